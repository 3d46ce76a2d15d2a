import pytest
import torch
from torch import nn

from tests.internals import Float8Optimizer, SplitOptimizer
from torch_fp8 import convert_optimizer


class StableAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr, decouple_lr=False):
        options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 1e-2, "triton": None}
        options |= {"decouple_lr": decouple_lr, "gradient_release": False, "max_lr": None}
        super().__init__(params, {"lr": lr, **options, "foreach": None, "setup": False})
        self.register_load_state_dict_post_hook(_restore)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            t = group["step"] = group.get("step", 0) + 1
            beta1, beta2 = (_debiased(group[name], t) for name in ("beta1", "beta2"))
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                rms = (p.grad.square() / v.clamp(min=group["eps"] ** 2)).mean().sqrt()
                lr = group["lr"] / max(1, float(rms))
                p.mul_(1 - lr * group["weight_decay"])
                p.addcdiv_(m, v.sqrt() + group["eps"], value=-lr)


def _debiased(beta, t):
    return (beta**t - beta) / (beta**t - 1)


def _restore(optimizer):
    assert all(group["triton"] is None for group in optimizer.param_groups)


StableAdamW.__module__, _restore.__module__ = "optimi.stableadamw", "optimi.stableadamw"


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 128), nn.Linear(128, 70))


def _step(models, optimizers, steps, growth=3.0):
    for step in range(steps):
        for model in models:
            for i, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(9 * step + i)
                p.grad = torch.randn(p.shape, generator=generator) * growth**step
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("growth", [3.0, 0.3])
def test_it_trains_as_optimis(growth):
    ours, stock = _model(), _model()
    start = [p.detach().clone() for p in stock.parameters()]
    optimizers = [StableAdamW(m.parameters(), lr=1e-3) for m in (ours, stock)]
    report = convert_optimizer(optimizers[0], model=ours)
    assert str(report) == "StableAdamW with 8-bit states"
    assert isinstance(optimizers[0], Float8Optimizer)
    assert optimizers[0].fp8_config.update_clipping
    _step([ours, stock], optimizers, 5, growth)
    clips = [float(s["update_rms"]) > 1 for s in optimizers[0].state.values() if len(s) > 3]
    assert clips == [growth > 1] * 2
    assert "update_rms" not in optimizers[0].state[ours[0].bias]
    for p, q, before in zip(ours.parameters(), stock.parameters(), start, strict=True):
        moved, expected = p.detach() - before, q.detach() - before
        if p.ndim == 2:
            assert (moved - expected).norm() < 0.05 * expected.norm()


def test_again_and_loading_keep_the_clipping():
    model = _model()
    optimizer = StableAdamW(model.parameters(), lr=1e-3)
    convert_optimizer(optimizer, model=model)
    assert convert_optimizer(optimizer, model=model).converted
    assert optimizer.fp8_config.update_clipping
    _step([model], [optimizer], 1)
    optimizer.load_state_dict(optimizer.state_dict())


def test_what_adamw_does_not_do_stays_with_its_own_step():
    model = _model()
    optimizer = StableAdamW(model.parameters(), lr=1e-3, decouple_lr=True)
    report = convert_optimizer(optimizer, model=model)
    assert "keeps its own states" in str(report)
    assert isinstance(optimizer, SplitOptimizer)
    stepped = StableAdamW(model.parameters(), lr=1e-3)
    _step([model], [stepped], 1)
    convert_optimizer(stepped, model=model)
    assert isinstance(stepped, SplitOptimizer)
