"""User code that works on weights in the middle of a loop, at each level and under each host."""

import json

import pytest
import torch

from tests.host_loops import WAYS
from tests.weight_walk import (
    check_gradients,
    check_higher_order,
    check_kept_copies,
    check_moments,
    differs,
    regroup,
)
from torch_fp8 import FP8Config
from torch_fp8.tensor.split_weight import SplitWeight


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("way", WAYS)
def test_user_code_finds_float32_weights(way, level, tmp_path, monkeypatch):
    """Reading, writing, copying, gradients, Adam's state, kept copies, derivatives, the file."""
    choices = {"opt_level": level, "emulate": True, "recipe": "tensorwise"}
    monkeypatch.setenv("TORCH_FP8_CONFIG", json.dumps(choices))  # of the Trainer, by its flag
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8" if way == "trainer" else "no")
    seen = []

    def visit(model, optimizer):
        assert sum(isinstance(p, SplitWeight) for p in model.parameters()) == 3
        assert differs(model) == []
        check_gradients(model)
        check_kept_copies(model)
        check_higher_order(model)
        check_moments(model, optimizer)
        if way != "trainer":  # whose scheduler counts the groups
            regroup(model, optimizer)
        seen.append((model, model.wide.weight.detach().clone()))

    saved = WAYS[way](FP8Config(**choices), visit, tmp_path)
    ((model, before),) = seen
    state = model.state_dict()
    assert saved.keys() == state.keys()
    assert {x.dtype for x in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[name], state[name]) for name in state)
    assert (state["wide.weight"] != before).float().mean() > 0.9  # it trains on
