import copy

import pytest
import torch
from torch import nn

from tests.internals import Float8Grad
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

CONFIGS = {
    "O1": FP8Config(opt_level="O1", emulate=True),
    "O2": FP8Config(emulate=True),
    "O3": FP8Config(opt_level="O3", emulate=True),
    "O3, release": FP8Config(opt_level="O3", gradient_release=True, emulate=True),
}


def _converted(config, trained=slice(None)):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=i < 2) for i in range(4)))
    convert_to_float8(model, config)
    groups = [{"params": list(layer.parameters())} for layer in model[trained]]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
    convert_optimizer(optimizer, config, model=model)
    return model, optimizer


def _step(model, optimizer, seed):
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    kinds = [type(layer.weight.grad) for layer in model]
    optimizer.step()
    return kinds


def _remove(optimizer):
    del optimizer.param_groups[0]
    return [False, True, True, True]


def _reverse(optimizer):
    optimizer.param_groups.reverse()
    return [True] * 4


def _split(optimizer):
    group = optimizer.param_groups[1]
    optimizer.param_groups.insert(0, {**group, "params": [group["params"].pop()], "lr": 1e-3})
    return [True] * 4


def _merge(optimizer):
    first, *rest = optimizer.param_groups
    first["params"] += [p for group in rest for p in group["params"]]
    del optimizer.param_groups[1:]
    return [True] * 4


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("change", [_remove, _reverse, _split, _merge])
def test_groups_change_between_steps(change, config):
    model, optimizer = _converted(config)
    _step(model, optimizer, 0)
    trained = change(optimizer)
    for seed in (1, 2):
        before = [layer.weight.detach().clone() for layer in model]
        kinds = _step(model, optimizer, seed)
        moved = [not torch.equal(b, m.weight) for b, m in zip(before, model, strict=True)]
        assert moved == trained
        if config.opt_level == "O3" and not config.gradient_release:
            # The weight that nobody steps any more keeps its hook until the next conversion.
            assert kinds == [Float8Grad] * 4


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_group_that_is_added_trains(config):
    model, optimizer = _converted(config, slice(2))
    _step(model, optimizer, 0)
    optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 1e-2})
    for seed in (1, 2, 3):
        before = [layer.weight.detach().clone() for layer in model]
        kinds = _step(model, optimizer, seed)
        moved = [not torch.equal(b, m.weight) for b, m in zip(before, model, strict=True)]
        assert moved == [True] * 4
    assert {state["step"].item() for p, state in optimizer.state.items() if p.ndim == 2} == {3, 4}
    if config.opt_level == "O3" and not config.gradient_release:
        assert kinds == [Float8Grad] * 4


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_weight_that_left_comes_back_and_resumes(config):
    model, optimizer = _converted(config)
    _step(model, optimizer, 0)
    group, weight = optimizer.param_groups[0], model[0].weight
    group["params"] = [p for p in group["params"] if p is not weight]
    del optimizer.state[weight]
    kept = weight.detach().clone()
    _step(model, optimizer, 1)
    assert torch.equal(weight.detach().clone(), kept)
    optimizer.add_param_group({"params": [weight], "lr": 1e-3})
    _step(model, optimizer, 2)
    assert not torch.equal(weight.detach().clone(), kept)
    assert optimizer.state[weight]["step"].item() == 1
    again, resumed = _converted(config)
    first = resumed.param_groups[0]
    first["params"] = [p for p in first["params"] if p is not again[0].weight]
    resumed.add_param_group({"params": [again[0].weight]})
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, of_each in ((model, optimizer), (again, resumed)):
        _step(each, of_each, 3)
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.detach().clone(), theirs.detach().clone())


def test_each_group_is_stepped_with_its_own_learning_rate():
    model, optimizer = _converted(CONFIGS["O2"])
    optimizer.param_groups[1]["lr"] = 0.0
    before = [layer.weight.detach().clone() for layer in model]
    _step(model, optimizer, 0)
    moved = [not torch.equal(layer.weight, old) for layer, old in zip(model, before, strict=True)]
    assert moved == [True, False, True, True]


def _moments(model, optimizer):
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = torch.full((96, 96), 0.25)


def _wide_gradient(model, optimizer):
    model[0].weight.grad = model[0].weight.grad.float()


_EDITS = {
    "learning rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=1e-3),
    "betas": lambda model, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.9)),
    "weight decay": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "maximize": lambda model, optimizer: optimizer.param_groups[0].update(maximize=True),
    "weight": lambda model, optimizer: model[0].weight.data.mul_(2),
    "moments": _moments,
    "gradient": lambda model, optimizer: model[0].weight.grad.neg_(),
    "dtype of a gradient": _wide_gradient,
}


@pytest.mark.parametrize("edit", _EDITS)
def test_a_step_takes_what_was_edited_since_the_last_one(edit):
    """As a copy does, which has not stepped before: nothing of a weight outlives its step."""
    model, optimizer = _converted(CONFIGS["O2"])
    for seed in range(2):
        _step(model, optimizer, seed)
    copied, of_copy = copy.deepcopy((model, optimizer))
    for layers, stepped in ((model, optimizer), (copied, of_copy)):
        gradient = torch.Generator().manual_seed(9)
        for layer in layers:
            layer.weight.grad = torch.randn(96, 96, generator=gradient)
        _EDITS[edit](layers, stepped)
        stepped.step()
    for layer, same in zip(model, copied, strict=True):
        assert torch.equal(layer.weight, same.weight)
