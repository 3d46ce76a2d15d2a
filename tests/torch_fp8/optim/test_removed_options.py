"""Optimizers that 0.1.0 saved with options that are removed since.

``removed_options.pt`` was written by commit 1eeb94f9 with ``moment_bits=4``: a model of float32
weights with ``residual_bits=0``, and one of BF16 weights with ``residual_bits=4``. It has their
state dicts, the pickled model and optimizer, and the values that they read as.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.internals import Float8Moment, convert_optimizer_file
from tests.steps import adamw
from torch_fp8 import FP8Config, merged_state_dict

FILE = Path(__file__).with_name("removed_options.pt")


@pytest.fixture(params=["float32", "bfloat16"])
def saved(request):
    return torch.load(FILE, weights_only=False)[request.param]


def _training(dtype):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(dtype)
    optimizer, _ = adamw(model, FP8Config(recipe="tensorwise"), lr=1e-3)
    return model, optimizer


def _check_goes_on(model, optimizer, values):
    """The values are those that were saved, the moment to 8 bits, and further steps work."""
    weight = model[0].weight
    assert torch.equal(merged_state_dict(model, optimizer)["0.weight"], values["weight"])
    first = optimizer.state[weight]["exp_avg"].clone()
    torch.testing.assert_close(first, values["exp_avg"], rtol=2**-4, atol=1e-3)
    assert not torch.equal(first, torch.zeros_like(first))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert isinstance(optimizer.state[weight]["exp_avg"], Float8Moment)
    moved = merged_state_dict(model, optimizer)["0.weight"] - values["weight"]
    assert 1e-5 < moved.abs().mean() < 2e-3
    assert "exp_avg_ratio_codes" not in optimizer.state_dict()["state"][0]


def test_state_dicts_are_loaded_into_8_bits(saved):
    of_model, of_optimizer = saved["state"]
    assert "exp_avg_ratio_codes" in of_optimizer["state"][0]
    model, optimizer = _training(of_model["0.weight"].dtype)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    _check_goes_on(model, optimizer, saved["values"])


def test_pickled_optimizers_go_on_in_8_bits(saved):
    _check_goes_on(*saved["pickle"], saved["values"])


def test_files_become_stocks(saved, tmp_path):
    source, target = tmp_path / "ours.pt", tmp_path / "stock.pt"
    torch.save(saved["state"][1], source)
    convert_optimizer_file(source, target)
    stock = torch.load(target, weights_only=True)
    assert torch.equal(stock["state"][0]["exp_avg"], saved["values"]["exp_avg"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("exp_avg_ratio_scale"), "'exp_avg_ratio_scale'] is not a uint8 tensor"),
        (
            lambda s: s.update(exp_avg_ratio_codes=s["exp_avg_ratio_codes"][:, :-1]),
            r"has shape \(64, 31\), expected \(64, 32\)",
        ),
        (
            lambda s: (
                [s.pop(f"exp_avg_sq_{part}") for part in ("codes", "scale")]
                and s.update(exp_avg_sq=torch.zeros(64, 64))
            ),
            "a ratio to 'exp_avg_sq_codes', which are missing",
        ),
    ],
)
def test_a_broken_state_is_refused_whole(saved, change, message):
    _, optimizer = _training(saved["state"][0]["0.weight"].dtype)
    state = saved["state"][1]
    change(state["state"][0])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert not optimizer.state
