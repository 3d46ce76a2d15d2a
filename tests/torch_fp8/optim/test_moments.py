import copy

import pytest
import torch
from torch import nn

from tests.internals import Float8Moment
from tests.steps import through_a_file
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report

NAMES = ("exp_avg", "exp_avg_sq")


def _trained(fp8=True, level="O2"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    if fp8:
        config = FP8Config(opt_level=level, emulate=True)
        convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)
    x = torch.randn(32, 96)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _step_with_zero_gradients(model, optimizer):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = model[0].weight.detach().float().clone()
    optimizer.step()
    return (model[0].weight.detach().float() - before).abs().max().item()


def _through_a_copy(optimizer, p):
    state = {key: value.clone() for key, value in optimizer.state[p].items()}
    optimizer.state[p] = {**state, **{name: state[name] * 0 for name in NAMES}}


RESETS = {
    "assigned": lambda o, p: o.state[p].update({name: torch.zeros_like(p.data) for name in NAMES}),
    "zeroed": lambda o, p: [o.state[p][name].zero_() for name in NAMES],
    "in a loop": lambda o, p: [state[name].mul_(0) for state in o.state.values() for name in NAMES],
    "by a view": lambda o, p: [o.state[p][name].view(-1).fill_(0) for name in NAMES],
    "foreach": lambda o, p: torch._foreach_zero_([o.state[p][name] for name in NAMES]),
    "popped": lambda o, p: o.state.pop(p),
    "through a copy": _through_a_copy,
}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("way", RESETS)
def test_a_reset_of_the_moments_stops_the_momentum(way, level):
    model, optimizer = _trained(level=level)
    RESETS[way](optimizer, model[0].weight)
    assert _step_with_zero_gradients(model, optimizer) == 0


def test_without_a_reset_momentum_moves_the_weight():
    assert _step_with_zero_gradients(*_trained()) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_moments_read_as_float32_close_to_stock(name):
    model, optimizer = _trained()
    stock_model, stock = _trained(fp8=False)
    read = optimizer.state[model[0].weight][name]
    wanted = stock.state[stock_model[0].weight][name]
    assert (read.dtype, read.shape, read.device) == (wanted.dtype, wanted.shape, wanted.device)
    assert (read - wanted).norm() < 0.2 * wanted.norm()
    assert torch.equal(read.exp(), read.clone().exp())
    assert type(read * 2) is torch.Tensor
    assert torch.equal(torch.from_numpy(read.numpy().copy()), read.clone())
    with pytest.raises(ValueError, match="read-only"):
        read.numpy()[0] = 1
    saved = optimizer.state_dict()["state"][0][name]
    assert type(saved) is torch.Tensor
    assert torch.equal(saved, read)


def test_an_assigned_moment_has_8_bits_after_the_step():
    model, optimizer = _trained()
    weight = model[0].weight
    before = memory_report(model, optimizer)
    optimizer.state[weight]["exp_avg"] = torch.randn(96, 96)
    assert memory_report(model, optimizer).moments == before.moments + 3 * weight.numel()
    _step_with_zero_gradients(model, optimizer)
    assert type(optimizer.state[weight]["exp_avg"]) is Float8Moment
    assert memory_report(model, optimizer).moments == before.moments
    optimizer.state[weight]["exp_avg"] = torch.zeros(96, 95)
    with pytest.raises(ValueError, match=r"'exp_avg'\] has shape \(96, 95\), but p has \(96, 96\)"):
        _step_with_zero_gradients(model, optimizer)


def test_a_parameter_that_takes_over_a_pruned_state_goes_on():
    """3D Gaussian splatting: rows are pruned from weights and their moments alike."""
    model, optimizer = _trained()
    old = model[0].weight
    state = optimizer.state.pop(old)
    keep = torch.arange(96) % 3 != 0
    for name in NAMES:
        state[name] = state[name][keep]
    new = nn.Parameter(old.detach().float()[keep])
    group = optimizer.param_groups[0]
    group["params"] = [new if p is old else p for p in group["params"]]
    optimizer.state[new] = state
    new.grad = torch.zeros_like(new)
    before = new.detach().clone()
    optimizer.step()
    assert (new - before).abs().max() > 1e-3
    assert torch.isfinite(new).all()


def test_a_copy_of_an_optimizer_keeps_8_bits_and_a_pickle_is_plain():
    _, optimizer = _trained()
    twin = copy.deepcopy(optimizer)
    moments = [state["exp_avg"] for state in twin.state.values() if state["exp_avg"].ndim == 2]
    assert {type(m) for m in moments} == {Float8Moment}
    first = next(iter(optimizer.state.values()))["exp_avg"]
    assert first.qdata.data_ptr() != moments[0].qdata.data_ptr()
    loaded = through_a_file(first, weights_only=True)
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, first)
