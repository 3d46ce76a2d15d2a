"""Layers multiply by the cast of a split weight's BF16 half; by that of float32 where it is plain.

docs/weights.md ("Limits") has the figures, of these layers.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.steps import gaussian, through_a_file
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, revert


def _output(model):
    with torch.no_grad():
        return model(gaussian(64, 256, dtype=torch.float32))


def _trained(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    convert_to_float8(model, FP8Config(recipe=recipe))
    _prepare(model)
    return model


def _prepare(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    convert_optimizer(optimizer, model[0].fp8.config, model=model)
    model(gaussian(64, 256, dtype=torch.float32)).square().mean().backward()
    optimizer.step()


def _fresh(model):
    fresh = copy.deepcopy(model)
    revert(fresh)
    convert_to_float8(fresh, model[0].fp8.config)
    fresh.load_state_dict(model.state_dict())
    return fresh


PLAIN = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "file": through_a_file,
    "state dict": _fresh,
}


@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_plain_copy_is_as_far_from_training_as_bf16_moves_codes(recipe, way):
    model = _trained(recipe)
    stock = copy.deepcopy(model)
    revert(stock)
    want, exact, got = _output(model), _output(stock), _output(PLAIN[way](model))
    apart, own = (got - want).norm() / want.norm(), (want - exact).norm() / exact.norm()
    assert 0.02 < apart < 0.04
    assert 0.04 < own < 0.06
    assert (got - exact).norm() < 1.05 * (want - exact).norm()  # neither is more exact


def test_a_deep_copy_and_a_split_copy_multiply_by_the_same_as_training():
    model = _trained("rowwise")
    want = _output(model)
    assert torch.equal(_output(copy.deepcopy(model)), want)
    plain = pickle.loads(pickle.dumps(model))
    convert_optimizer(torch.optim.AdamW(plain.parameters()), model=plain)
    assert torch.equal(_output(plain), want)


@pytest.mark.parametrize("options", [{"opt_level": "O1"}, {"split_weights": False}], ids=str)
def test_without_split_weights_all_copies_are_equal(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    convert_to_float8(model, FP8Config(recipe="rowwise", **options))
    _prepare(model)
    assert torch.equal(_output(pickle.loads(pickle.dumps(model))), _output(model))
