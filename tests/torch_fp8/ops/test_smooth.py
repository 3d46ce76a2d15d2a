import math

import pytest
import torch

from tests.steps import gaussian
from torch_fp8.ops import smooth
from torch_fp8.ops.swiglu import swiglu, swiglu_save

E4M3 = torch.float8_e4m3fn


def test_factors_are_the_root_of_the_amax_as_powers_of_two():
    amax = torch.tensor([1.0, 3.9, 4.0, 40000.0, 2.0**-6, 0.9])
    s, inverse, smoothed = smooth.smooth_factors(amax)
    assert s.tolist() == [1.0, 1.0, 0.5, 2.0**-7, 8.0, 2.0]
    assert torch.equal(s * inverse, torch.ones(6))
    assert smoothed == 40000 / 128


def test_small_dead_and_broken_channels():
    tiny, bad = 2.0**-100, [math.inf, math.nan]
    s, inverse, smoothed = smooth.smooth_factors(torch.tensor([1.0, 0.0, tiny, *bad]))
    assert s.tolist() == [1.0, 2.0**16, 2.0**16, 1.0, 1.0]
    assert not smoothed.isfinite()
    assert (s * inverse).tolist() == [1.0] * 5
    for amax in (torch.zeros(3), torch.tensor([2.0**-140, 0.0]), torch.tensor([3e38])):
        s, inverse, smoothed = smooth.smooth_factors(amax)
        assert torch.equal(s * inverse, torch.ones_like(amax))
        assert smoothed.isfinite()
    assert [part.numel() for part in smooth.smooth_factors(torch.empty(0))] == [0, 0, 1]


@pytest.mark.parametrize("shape", [(5, 48), (0, 48), (130, 7)], ids=str)
def test_the_amax_of_columns(shape):
    x = gaussian(*shape)
    amax = smooth.column_amax(x)
    assert amax.shape == shape[1:]
    if shape[0]:
        assert torch.equal(amax, x.float().abs().amax(0))
        x[1, 2] = math.nan
        assert smooth.column_amax(x)[2].isnan()
    else:
        assert not amax.any()


@pytest.mark.parametrize("save", [True, False])
def test_what_is_saved_is_what_is_saved_without(save):
    gate, up = gaussian(40, 144), gaussian(40, 144, seed=2)
    *saved, amax = smooth.swiglu_save_columns(gate, up, save)
    *want, largest = swiglu_save(gate, up, None, save)
    for got, expected in zip(saved, want, strict=True):
        if save:
            assert torch.equal(got.float(), expected.float())
        else:
            assert got is None or not got.numel()
    assert amax.amax() == largest
    assert torch.equal(amax, swiglu(gate, up, None).float().abs().amax(0))
