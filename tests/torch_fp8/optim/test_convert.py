import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.internals import Float8Optimizer, SplitWeight, split_parameter
from tests.processes import ran
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    memory_report,
    merged_state_dict,
    restore_weights,
)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 128), nn.LayerNorm(128), nn.Linear(128, 70))


def _step(model, optimizer):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 96)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class _WithOwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_a_compiled_model_keeps_weights_as_well():
    """It has no length, and so no truth value."""
    config = FP8Config(cache_weights=True)
    model = torch.compile(nn.Linear(96, 128), backend="eager")
    convert_to_float8(model, config)
    report = convert_optimizer(torch.optim.AdamW(model.parameters()), config, model=model)
    assert report.num_cached == 1


def test_the_object_keeps_its_groups_options_and_type():
    model = _model()
    groups = [
        {"params": [model[0].weight], "lr": 1e-3, "name": "first"},
        {"params": list(model[2].parameters()), "weight_decay": 0.3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.8, 0.95), foreach=True)
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    reference = optimizer.param_groups[0]
    convert_optimizer(optimizer)
    assert optimizer.param_groups[0] is reference
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == before
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, Float8Optimizer)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "8-bit states are for Adam and AdamW"),
        (torch.optim.NAdam, "8-bit states are for Adam and AdamW"),
        (_WithOwnStep, "_WithOwnStep has its own step"),
    ],
    ids=["sgd", "nadam", "own step"],
)
def test_other_optimizers_keep_their_states_with_the_reason(make, reason):
    model = _model()
    optimizer = make(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = convert_optimizer(optimizer, model=model)
    assert [str(w.message) for w in caught] == (
        [f"{reason}: it keeps its own states"] if isinstance(optimizer, torch.optim.AdamW) else []
    )
    assert f"keeps its own states: {reason}; 2 weights in two halves" in str(report)
    assert not isinstance(optimizer, Float8Optimizer)


@pytest.mark.long
def test_the_first_optimizer_of_a_process_may_be_a_subclass(forked_python):
    """torch puts its hooks around the ``step`` of whichever class comes first."""
    script = """
        import torch
        from torch import nn
        from torch_fp8 import convert_optimizer

        class First(torch.optim.AdamW):
            pass

        model = nn.Sequential(nn.Linear(64, 64))
        print(convert_optimizer(First(model.parameters()), model=model))
    """
    assert ran(forked_python, "-c", script).stdout == "First with 8-bit states\n"


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_a_scheduler_and_hooks_work_on(cls, scheduler_first, recwarn):
    model = _model()
    optimizer = cls(model.parameters(), lr=1.0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def schedule():
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)

    scheduler = schedule() if scheduler_first else None
    convert_optimizer(optimizer, model=model)
    scheduler = scheduler or schedule()
    for _ in range(2):
        _step(model, optimizer)
        scheduler.step()
    assert isinstance(optimizer, cls)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert calls == ["before", "after"] * 2
    assert not [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("shape", [(1, 4096), (4096, 1), (64, 64, 3, 3), (3, 37, 61), (70, 70)])
def test_any_shape_steps(shape, split):
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0)
    convert_optimizer(optimizer)
    if split:
        split_parameter(parameter)
    before = parameter.detach().float().clone()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert isinstance(parameter, SplitWeight) == split
    assert parameter.shape == shape
    torch.testing.assert_close(
        before - parameter.float(), torch.full(shape, 1e-2), rtol=0, atol=0.02
    )
    assert (before - parameter.float()).mean().item() == pytest.approx(1e-2, rel=0.1)


def test_a_transposed_weight_is_stepped():
    parameter = nn.Parameter(torch.randn(128, 64).t())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0)
    convert_optimizer(optimizer)
    before = parameter.detach().float().clone()
    split_parameter(parameter)
    torch.testing.assert_close(parameter.detach(), before, rtol=2**-16, atol=0)
    before = parameter.detach().float().clone()
    parameter.grad = torch.ones(128, 64, dtype=torch.bfloat16).t()
    optimizer.step()
    # Within the last bit of the residual of the largest, between 4 and 8.
    torch.testing.assert_close(
        before - parameter.detach(), torch.full_like(before, 1e-2), rtol=0, atol=2.0**-13
    )


def test_float16_steps_in_float32_and_resumes():
    # eps and the square of 1e-4 are zero in float16, which made NaN of gradients of zero
    gradient = torch.tensor([0.0, 1e-4, -0.5]).repeat(64, 64)
    parameters = [nn.Parameter(torch.ones(64, 192, dtype=torch.float16)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([p], lr=1e-2, weight_decay=0) for p in parameters]
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        convert_optimizer(optimizer)
        parameter.grad = gradient.half()
        optimizer.step()
        expected = 1 - 1e-2 * gradient.sign()
        assert torch.allclose(parameter.float(), expected, atol=1e-3)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[1].state[parameters[1]]["exp_avg_sq"].dtype == torch.float32
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(*parameters)


def test_restored_weights_are_float32_and_split_again_exactly():
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    convert_optimizer(optimizer, model=model)
    _step(model, optimizer)
    merged = merged_state_dict(model, optimizer)
    parameters = list(model.parameters())
    assert restore_weights(optimizer) == 2
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert {(type(p), p.dtype) for p in parameters} == {(nn.Parameter, torch.float32)}
    assert memory_report(model, optimizer).master == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, merged[name])
    convert_optimizer(optimizer, model=model)
    again = merged_state_dict(model, optimizer)
    assert all(torch.equal(value, again[name]) for name, value in merged.items())
    assert restore_weights(torch.optim.SGD(model.parameters(), 0.1)) == 0


@pytest.mark.parametrize(
    ("split", "rate", "warned"), [(False, 1e-6, 1), (False, 1e-4, 0), (True, 1e-7, 0)]
)
def test_no_residual_at_a_small_learning_rate_warns(split, rate, warned):
    optimizer = torch.optim.AdamW(_model().bfloat16().parameters(), lr=rate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_optimizer(optimizer, FP8Config(split_weights=split))
    assert len([w for w in caught if "split_weights=False" in str(w.message)]) == warned


def test_clipping_of_sharded_weights_is_refused(monkeypatch):
    sharded = nn.Parameter(torch.zeros(64, 64))
    monkeypatch.setattr("torch_fp8.optim.convert.DTensor", nn.Parameter)
    with pytest.raises(ValueError, match=r"update_clipping=True\) needs the RMS of whole weights"):
        convert_optimizer(torch.optim.AdamW([sharded]), FP8Config(update_clipping=True))


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_only_weights_that_ddp_has_wrapped_stay_float32(level):
    early, late, config = _model(), _model(), FP8Config(opt_level=level)
    models = nn.ModuleList([early, late])
    convert_to_float8(models, config)
    optimizer = torch.optim.AdamW(models.parameters())
    models[0] = DistributedDataParallel(early)
    report = convert_optimizer(optimizer, config, model=models)
    assert [type(m[0].weight) for m in (early, late)] == [nn.Parameter, SplitWeight]
    assert (report.num_split, report.num_float32) == (2, 2)
    assert report.why_float32 == "DistributedDataParallel has wrapped them before"
    assert report.num_fp8_gradients == (2 if level == "O3" else 0)
    models[1] = DistributedDataParallel(late)  # a second call changes nothing
    assert convert_optimizer(optimizer, config, model=models) == report
