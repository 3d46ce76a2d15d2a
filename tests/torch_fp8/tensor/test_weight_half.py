"""Layers multiply by the cast of a split weight's BF16 half; by that of float32 where it is plain.

docs/weights.md ("Limits") has the figures, of these layers.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.steps import gaussian
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8


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


def test_a_deep_copy_and_a_split_copy_multiply_by_the_same_as_training():
    model = _trained("rowwise")
    want = _output(model)
    assert torch.equal(_output(copy.deepcopy(model)), want)
    plain = pickle.loads(pickle.dumps(model))
    convert_optimizer(torch.optim.AdamW(plain.parameters()), model=plain)
    assert torch.equal(_output(plain), want)


@pytest.mark.parametrize("options", [{"opt_level": "O1"}, {"split_weights": False}], ids=str)
def test_without_split_weights_all_copies_are_equal(options):
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    convert_to_float8(model, FP8Config(recipe="rowwise", **options))
    _prepare(model)
    assert torch.equal(_output(pickle.loads(pickle.dumps(model))), _output(model))
