"""FP8-LM's mu: its rule, its bounds and its checkpoint."""

import pytest
import torch
from torch import nn

from torch_fp8 import FP8Config, convert_to_float8, load_scaling_state_dict, revert
from torch_fp8 import scaling_state_dict as state_of
from torch_fp8.distributed.ddp.fp8_lm import (
    MAX_SATURATED,
    AutomaticScaling,
    automatic_scaling,
    set_automatic_scaling,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("saturated", "halved"), [(1, False), (2, True)])
def test_mu_is_halved_above_the_share_of_the_paper(saturated, halved):
    scaling = AutomaticScaling(torch.tensor(0.5))
    scaling.update(torch.tensor(saturated), round(1 / MAX_SATURATED), 8)
    assert scaling.mu.item() == pytest.approx(0.25 if halved else 0.5 * 2**0.001)


def test_mu_doubles_in_1000_steps():
    scaling = AutomaticScaling(torch.tensor(0.25))
    for _ in range(1000):
        scaling.update(torch.tensor(0), 100, 8)
    assert scaling.mu.item() == pytest.approx(0.5, rel=1e-4)


def test_mu_stays_within_its_bounds():
    scaling = AutomaticScaling(torch.tensor(1.0))
    scaling.update(torch.tensor(0), 100, 8)
    assert scaling.mu.item() == 1
    for _ in range(5):
        scaling.update(torch.tensor(100), 100, 8)
    assert scaling.mu.item() == 1 / 8
    # A checkpoint of more ranks.
    assert AutomaticScaling(torch.tensor(1 / 8)).prepare(2, CPU).item() == 1 / 2


def test_mu_starts_between_its_bounds():
    assert AutomaticScaling().prepare(4, CPU).item() == 0.5


def converted(**options):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert_to_float8(model, FP8Config(**options))
    return model


def test_a_model_without_it_has_no_state():
    model = converted()
    assert state_of(model) == {}
    set_automatic_scaling(model, AutomaticScaling())
    assert state_of(model) == {}  # no step yet


@pytest.mark.parametrize("wrapped", [False, True], ids=["before wrapping", "after"])
def test_mu_is_saved_and_loaded(wrapped):
    saved, loaded = converted(), converted()
    set_automatic_scaling(saved, AutomaticScaling(torch.tensor(0.375)))
    if wrapped:
        set_automatic_scaling(loaded, AutomaticScaling())
    scaling = automatic_scaling(loaded)
    load_scaling_state_dict(loaded, state_of(saved))
    assert automatic_scaling(loaded).mu.item() == 0.375
    assert not wrapped or automatic_scaling(loaded) is scaling
    automatic_scaling(saved).update(torch.tensor(1), 1, 8)
    assert automatic_scaling(loaded).mu.item() == 0.375


def test_mu_is_beside_the_history_of_delayed_scaling():
    saved, loaded = converted(recipe="delayed"), converted(recipe="delayed")
    set_automatic_scaling(saved, AutomaticScaling(torch.tensor(0.375)))
    history = saved[0].fp8_amax_history.fill_(3)
    load_scaling_state_dict(loaded, state_of(saved))
    assert automatic_scaling(loaded).mu.item() == 0.375
    assert torch.equal(loaded[0].fp8_amax_history, history)
    load_scaling_state_dict(loaded, {"automatic_scaling.mu": torch.tensor(0.25)})
    assert automatic_scaling(loaded).mu.item() == 0.25
    assert torch.equal(loaded[0].fp8_amax_history, history)


def test_a_reverted_model_has_nothing_of_it():
    model = converted()
    before = set(nn.Sequential().__dict__)
    set_automatic_scaling(model, AutomaticScaling(torch.tensor(0.375)))
    revert(model)
    assert set(model.__dict__) - before <= {"_modules"}
