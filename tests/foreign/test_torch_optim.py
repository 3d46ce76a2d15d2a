"""torch's own inputs and cases for Adam and AdamW, on converted optimizers.

The inputs are those of ``torch.testing._internal.common_optimizers``; the cases are those that
torch's test_optim.py puts every optimizer through: hooks, copies, checkpoints of other shapes,
steps that do nothing. What stock does, step by step, is what a converted one is to do.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.steps import same
from torch_fp8 import convert_optimizer, merged_state_dict

common = pytest.importorskip("torch.testing._internal.common_optimizers", reason="needs expecttest")

CLASSES = (torch.optim.Adam, torch.optim.AdamW)
INFOS = [info for info in common.optim_db if info.optim_cls in CLASSES]
REFUSED = {"amsgrad", "capturable", "differentiable"}


def _inputs(devices=("cpu", "cuda")):
    """Class and options of every input; those for CUDA have tensors as lr and betas on the CPU."""
    cases, seen = [], set()
    for info in INFOS:
        for device in devices:
            for given in info.optim_inputs_func(device=device):
                for flag in ({}, *({name: True} for name in info.supported_impls)):
                    options = {**given.kwargs, **flag}
                    name = f"{info.optim_cls.__name__}-{given.desc}-{'-'.join(flag)}"
                    if name not in seen:
                        seen.add(name)
                        cases.append(pytest.param(info.optim_cls, options, id=name))
    return cases


def _stock(cls, options):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cls, {k: copy.deepcopy(v) for k, v in options.items()}, _make(cls, options)
    except (ValueError, RuntimeError) as error:
        pytest.skip(f"stock refuses it: {error}")


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 5), nn.LayerNorm(5))


def _make(cls, options, model=None):
    model = _model() if model is None else model
    return model, cls(model.parameters(), **copy.deepcopy(options))


def _converted(cls, options, model=None):
    model, optimizer = _make(cls, options, model)
    assert convert_optimizer(optimizer, model=model).converted
    return model, optimizer


def _closure(model, optimizer, seed=0):
    def closure():
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    return closure


def _run(model, optimizer, steps=4, first=0):
    return [
        float(optimizer.step(_closure(model, optimizer, s))) for s in range(first, first + steps)
    ]


def _quick(parameters):
    first = {id(next(p for p in parameters if p.values[0] is cls)) for cls in CLASSES}
    return [p if id(p) in first else pytest.param(*p.values, id=p.id, marks=pytest.mark.slow)
            for p in parameters]  # fmt: skip


each_input = pytest.mark.parametrize(("cls", "options"), _quick(_inputs()))
each_class = pytest.mark.parametrize("cls", CLASSES)


@each_input
def test_each_input_steps_as_stock_or_is_refused_by_name(cls, options):
    cls, options, (stock, plain) = _stock(cls, options)
    refused = REFUSED & {name for name, value in options.items() if value}
    if refused:
        with pytest.raises(ValueError, match="|".join(refused)):
            _converted(cls, options)
        return
    model, optimizer = _converted(cls, options)
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=2**-8, atol=0)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(model.parameters(), stock.parameters(), strict=True):
            q.grad = torch.randn(q.shape, generator=generator).bfloat16().float()
            p.grad = q.grad.to(p.dtype)
        plain.step()
        optimizer.step()
    merged = merged_state_dict(model, optimizer)
    start = _model().state_dict()
    for name, expected in stock.state_dict().items():
        if expected.numel() < 4096:  # torch's own function steps it
            torch.testing.assert_close(merged[name], expected, rtol=1e-6, atol=1e-7)
            continue
        moved, stocks = merged[name] - start[name], expected - start[name]
        assert (moved - stocks).norm() < 0.1 * stocks.norm()  # two moments in 8 bits


@each_class
def test_states_of_older_versions_load(cls):
    model, optimizer = _converted(cls, {})
    _run(model, optimizer)
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in ("maximize", "foreach", "capturable", "differentiable", "fused"):
            group.pop(flag, None)
    for state in old["state"].values():
        state["step"] = state["step"].item()
    optimizer.load_state_dict(old)
    assert [s["step"].item() for s in optimizer.state.values()] == [4.0] * len(old["state"])
    _run(model, optimizer)


@each_class
def test_named_and_unnamed_parameters_load_each_other(cls):
    def made(named):
        model = _model()
        given = model.named_parameters() if named else model.parameters()
        optimizer = cls(given)
        convert_optimizer(optimizer, model=model)
        return model, optimizer

    for first in (True, False):
        for second in (True, False):
            model, optimizer = made(first)
            _run(model, optimizer)
            twin, other = made(second)
            twin.load_state_dict(model.state_dict())
            other.load_state_dict(optimizer.state_dict())
            names = [n for n, _ in model.named_parameters()]
            group = other.param_groups[0]
            assert group.get("param_names") == (names if first or second else None)
            assert _run(model, optimizer, first=4) == _run(twin, other, first=4)


@each_class
def test_steps_that_do_nothing_in_stock_do_nothing(cls):
    model, optimizer = _converted(cls, {"weight_decay": 0.1})
    before = merged_state_dict(model, optimizer)
    optimizer.step()  # no gradients
    assert same(merged_state_dict(model, optimizer), before)
    assert not optimizer.state
    model, optimizer = _converted(cls, {"weight_decay": 0.0})
    before = merged_state_dict(model, optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same(merged_state_dict(model, optimizer), before)


@each_class
def test_empty_and_complex_parameters_step(cls):
    empty, complex_ = (
        nn.Parameter(torch.zeros(0, 64)),
        nn.Parameter(torch.ones(3, dtype=torch.cfloat)),
    )
    twin = nn.Parameter(complex_.detach().clone())
    optimizer, plain = cls([empty, complex_]), cls([twin])
    convert_optimizer(optimizer)
    for _ in range(3):
        empty.grad = torch.zeros_like(empty)
        complex_.grad = twin.grad = torch.full_like(twin, 1 + 2j)
        optimizer.step()
        plain.step()
    assert torch.equal(complex_, twin)
