import abc
import ctypes

import pytest
import torch
from torch import nn

from tests.internals import Float8Grad, SplitWeight, expected_memory, stored_grad
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report

STEPS = 6


class Lion(torch.optim.Optimizer):
    """As published: a loop over the weights, and ``p.data``."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state, (beta1, beta2) = self.state[p], group["betas"]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class ScheduleFree(torch.optim.Optimizer):
    """As published: counts in its groups, and writes weights outside of its step."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    def _swap(self, training, weight):
        for group in self.param_groups:
            for p in group["params"] if group["training"] != training else ():
                if "z" in self.state[p]:
                    p.data.lerp_(end=self.state[p]["z"], weight=weight(group["beta"]))
            group["training"] = training

    def eval(self):
        self._swap(False, lambda beta: 1 - 1 / beta)

    def train(self):
        self._swap(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            weight, lr, beta = 1 / (group["k"] + 1), group["lr"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p.data)
                z = self.state[p]["z"]
                p.data.lerp_(end=z, weight=weight)
                p.data.add_(p.grad, alpha=lr * (beta * (1 - weight) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] += 1


class ChangesGradients(torch.optim.Optimizer):
    """It has a list of weights, changes ``p.grad`` in one loop and steps it in the next."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.every = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.every:
            p.grad.data.mul_(0.1).add_(p, alpha=0.01)
        for p in self.every:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class Lookahead(torch.optim.Optimizer):
    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups[0]["params"], {})
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            p.data, slow.data = slow.lerp(p, 0.5), p.data.clone()


class CompiledStep(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.update = torch.compile(self._update, backend="eager")

    @staticmethod
    def _update(weight, grad):
        weight.add_(grad, alpha=-0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad)


class SharpnessAware(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.05, "rho": 0.5})

    def step(self, closure):
        closure()
        every = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in every]).norm()
            moves = [self.param_groups[0]["rho"] / norm * p.grad for p in every]
            torch._foreach_add_(every, moves)
        loss = closure()
        with torch.no_grad():
            for p, move in zip(every, moves, strict=True):
                p.sub_(move).sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


class RawPointers(torch.optim.Optimizer):
    def __init__(self, params, read=lambda p: p):
        super().__init__(params, {"lr": 0.1})
        self.read = read

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            moved = (p - 0.1 * p.grad).contiguous()
            ctypes.memmove(self.read(p).data_ptr(), moved.data_ptr(), 4 * p.numel())


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def _muon(parameters):
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-3)


def _adafactor(parameters):
    transformers = pytest.importorskip("transformers")
    return transformers.Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


def _eight_bit(parameters):
    return pytest.importorskip("torchao.optim").AdamW8bit(parameters, lr=1e-3)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "muon": _muon,
    "own step": lambda p: OwnStep(p, lr=1e-3),
    "adafactor of transformers": _adafactor,
    "lion": Lion,
    "schedule-free": ScheduleFree,
    "changed gradients": ChangesGradients,
    "lookahead": Lookahead,
    "compiled step": CompiledStep,
}
every_optimizer = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n == "compiled step")) for n in OPTIMIZERS]
)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 128), nn.LayerNorm(128), nn.Linear(128, 70))


def _converted(make, config=None):
    model = _model()
    config = config or FP8Config()
    convert_to_float8(model, config)
    optimizer = make(model.parameters())
    return model, optimizer, convert_optimizer(optimizer, config, model=model)


def _step(models, optimizers, steps=STEPS, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        shapes = [p.shape for p in models[0].parameters()]
        grads = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
        for model, optimizer in zip(models, optimizers, strict=True):
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad.clone()
            optimizer.step()


def _backward(model):
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 96)).float().square().mean().backward()


@pytest.mark.filterwarnings("ignore:OwnStep has its own step")
@every_optimizer
def test_it_trains_as_on_float32_weights(name):
    """What is lost is a part of 2^-17 of each weight and step."""
    stock = _model()
    optimizers = [OPTIMIZERS[name](stock.parameters())]
    start = [p.detach().clone() for p in stock.parameters()]
    model, ours, report = _converted(OPTIMIZERS[name])
    assert (report.converted, report.num_split) == (True, 2)
    states = "an int8 momentum" if name == "muon" else "keeps its own states"
    assert states in str(report)
    assert "2 weights in two halves" in str(report)
    _step([stock, model], [*optimizers, ours])
    for p, q, before in zip(stock.parameters(), model.parameters(), start, strict=True):
        assert isinstance(q, SplitWeight) == (q.ndim == 2)
        if q.ndim == 2:
            assert [part.dtype for part in q.halves.tensors] == [torch.bfloat16, torch.int8]
        bound = STEPS * 2**-16 * before.abs().amax() + 0.02 * (p - before).abs().amax()
        assert (q - p).abs().amax() <= bound
    states = [[s.keys() for s in o.state.values()] for o in (*optimizers, ours)]
    assert states[0] == states[1]
    assert set(ours.state) <= set(model.parameters())
    assert all(type(group["params"]) is list for group in ours.param_groups)


@pytest.mark.parametrize("make", [Lion, OPTIMIZERS["sgd, foreach"]])
def test_a_step_makes_no_float32_copies(make, monkeypatch):
    """Weights that are written take 2 + 2 bytes until the step ends."""
    model, optimizer, _ = _converted(make)
    _backward(model)
    sizes, step = [], make(model.parameters()).__class__.step

    def measured(self, closure=None):
        step(self)
        weights = [model[0].weight, model[2].weight]
        report = memory_report(model, optimizer, parameters=weights)
        sizes.append((report.weights, report.master, report.gradients))

    measured.__module__ = step.__module__
    optimizer._fp8_base = type("Measured", (optimizer._fp8_base,), {"step": measured})
    optimizer.step()
    numel = model[0].weight.numel() + model[2].weight.numel()
    assert sizes == [(2 * numel, 2 * numel, 2 * numel)]


def test_bytes_are_five_of_weight_and_gradient():
    model, optimizer, _ = _converted(OPTIMIZERS["sgd"])
    _backward(model)
    optimizer.step()
    weights = [model[0].weight, model[2].weight]
    report = memory_report(model, optimizer, parameters=weights)
    numel = sum(w.numel() for w in weights)
    assert (report.weights, report.master, report.gradients) == (2 * numel, numel, 2 * numel)
    assert report.moments == 4 * numel
    whole = memory_report(model, optimizer)
    expected = expected_memory(model, [optimizer])
    for category in ("weights", "master", "gradients", "moments"):
        assert getattr(expected, category) == getattr(whole, category)


@pytest.mark.parametrize("make", [SharpnessAware, torch.optim.LBFGS, OPTIMIZERS["sgd"]])
def test_a_closure_sees_the_weights_of_that_moment(make):
    weights, losses = [], []
    for level in ("O1", "O2"):
        model = _model()
        optimizer = make(model.parameters())
        report = convert_optimizer(optimizer, FP8Config(opt_level=level), model=model)
        assert report.num_split == (2 if level == "O2" else 0)
        target, seen = torch.randn(3, 70, generator=torch.Generator().manual_seed(0)), []

        def closure(model=model, optimizer=optimizer, target=target, seen=seen):
            assert torch.is_grad_enabled()
            assert model[0].weight.data_ptr() is not None
            optimizer.zero_grad()
            loss = (model(torch.ones(3, 96)) - target).square().mean()
            loss.backward()
            seen.append(float(loss))
            return loss

        loss = optimizer.step(closure)
        assert float(loss) in seen
        weights.append(model[2].weight.detach().clone())
        losses.append(seen)
    assert losses[1][:5] == pytest.approx(losses[0][:5], rel=1e-2)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "read", [lambda p: p, lambda p: p.data, lambda p: p.grad, lambda p: p.view(-1)]
)
def test_an_address_is_refused_within_a_step(read):
    model, optimizer, _ = _converted(lambda p: RawPointers(p, read))
    _backward(model)
    with pytest.raises(
        RuntimeError, match=r"RawPointers asks for the address.*split_weights=False"
    ):
        optimizer.step()
    assert model[0].weight.data_ptr() == 0


def test_changed_gradients_are_bf16_at_level_o3():
    """The error of E5M2 would be 25 dB below the update, 2^-4."""
    model, optimizer, report = _converted(ChangesGradients, FP8Config(opt_level="O3"))
    assert report.num_fp8_gradients == 2
    _backward(model)
    weight = model[0].weight
    assert isinstance(stored_grad(weight), Float8Grad)
    grad, before = weight.grad.detach().clone(), weight.detach().clone()
    optimizer.step()
    update = -0.1 * (0.1 * grad + 0.01 * before)
    error = weight.detach() - before - update
    assert error.norm() <= 2**-6 * update.norm()


def test_what_the_optimizer_writes_outside_of_its_step_arrives():
    stock = _model()
    reference = ScheduleFree(stock.parameters())
    model, optimizer, _ = _converted(ScheduleFree)
    _step([stock, model], [reference, optimizer], 2)
    for each in (reference, optimizer):
        each.eval()
    averaged = model[0].weight.detach().clone()
    torch.testing.assert_close(averaged, stock[0].weight.detach(), rtol=1e-3, atol=1e-5)
    for each in (reference, optimizer):
        each.train()
    assert not torch.equal(averaged, model[0].weight)


def test_a_step_that_fails_leaves_groups_and_weights_whole():
    model, optimizer, _ = _converted(ChangesGradients)
    before = model[0].weight.detach().clone()
    with pytest.raises(AttributeError):
        optimizer.step()  # no gradients
    assert [type(p) for p in optimizer.param_groups[0]["params"]] == [
        type(p) for p in model.parameters()
    ]
    assert torch.equal(before, model[0].weight)


def _flattened(parameters):
    optimizer = Lion(parameters)
    optimizer.flat = [p.detach().view(-1) for p in optimizer.param_groups[0]["params"]]
    return optimizer


def _compiled(parameters):
    return type("Fused", (Lion,), {"__module__": "apex.optimizers"})(parameters)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_flattened, "it holds a tensor that shares their memory"),
        (_compiled, "apex passes them to compiled code"),
        (_eight_bit, "torchao passes them to compiled code"),
    ],
)
def test_an_optimizer_that_cannot_is_left_alone_with_the_reason(make, reason):
    model = _model()
    optimizer = make(model.parameters())
    cls = type(optimizer)
    report = convert_optimizer(optimizer, model=model)
    assert not report.converted
    assert f"its weights stay float32: {reason}" in str(report)
    assert type(optimizer) is cls
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_options_of_adam_are_named_where_they_do_not_apply():
    config = FP8Config(gradient_release=True, update_clipping=True)
    _, optimizer, report = _converted(Lion, config)
    assert "gradient_release and update_clipping are for Adam and AdamW" in str(report)
    assert not optimizer.fp8_config.gradient_release


def test_sparse_gradients_keep_an_embedding_in_float32():
    model = nn.Sequential(nn.Embedding(64, 128, sparse=True), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = convert_optimizer(optimizer, model=model)
    assert (report.num_split, report.num_float32) == (1, 1)
    assert "sparse gradients" in str(report)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def test_a_class_over_a_converted_one_keeps_its_own_bases():
    class Host:
        pass

    class Named(abc.ABC, torch.optim.SGD):
        pass

    for cls in (torch.optim.SGD, torch.optim.AdamW, Named):
        model = nn.Sequential(nn.Linear(64, 64))
        optimizer = cls(model.parameters(), lr=0.1)
        convert_to_float8(model, FP8Config(recipe="tensorwise"))
        convert_optimizer(optimizer, FP8Config(recipe="tensorwise"), model=model)
        wrapper = type("HostOptimizer", (Host, type(optimizer)), {})
        assert wrapper.__mro__[1:3] == (Host, type(optimizer))
        assert wrapper.step is type(optimizer).step is not cls.step
