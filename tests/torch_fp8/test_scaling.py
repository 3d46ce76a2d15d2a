import math

import pytest
import torch

from torch_fp8.formats import E4M3, E5M2, MIN_SCALE
from torch_fp8.scaling import (
    delayed_scale,
    push_amax,
    round_up_to_power_of_two,
    scale_from_amax,
    tensor_amax,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_exact_and_sees_nan(dtype):
    x = torch.randn(33, 17).to(dtype)
    assert tensor_amax(x).dtype == torch.float32
    assert tensor_amax(x) == x.float().abs().max()
    x[3, 4] = math.nan
    assert tensor_amax(x).isnan()
    x[3, 4] = -math.inf
    assert tensor_amax(x) == math.inf
    assert tensor_amax(x[:0]) == 0


def test_the_largest_element_lands_on_the_largest_number():
    amax = torch.tensor([1.0, 3.7, 1e-20, 1e20])
    assert torch.equal(scale_from_amax(amax, E4M3), amax / 448)
    assert torch.equal(scale_from_amax(amax, E5M2), amax / 57344)


def test_edges_of_the_scale():
    amax = torch.tensor([0.0, 1e-44, math.inf, math.nan])
    for power_of_two in (False, True):
        scale = scale_from_amax(amax, E4M3, power_of_two)
        assert scale[0] == 1
        assert scale[1] == MIN_SCALE
        assert scale[2] == math.inf
        assert scale[3].isnan()


def test_rounding_up_to_powers_of_two_is_exact():
    x = torch.tensor([1.0, 1.0000001, 0.75, 3.0, 2.0**-100, 2.0**100 * 1.5])
    expected = torch.tensor([1.0, 2.0, 1.0, 4.0, 2.0**-100, 2.0**101])
    assert torch.equal(round_up_to_power_of_two(x), expected)
    random = torch.rand(1000).exp() * 10.0 ** torch.randint(-30, 30, (1000,))
    up = round_up_to_power_of_two(random)
    assert torch.equal(torch.frexp(up).mantissa, torch.full((1000,), 0.5))
    assert ((up >= random) & (up < 2 * random)).all()


def test_power_of_two_scales_are_exact_in_e8m0():
    scale = scale_from_amax(torch.rand(1000) * 10.0 ** torch.randint(-30, 30, (1000,)), E4M3, True)
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)


def test_delayed_scale_follows_the_history():
    history = torch.tensor([2.0, 8.0, 4.0, 0.0])
    now = torch.tensor(100.0)
    assert delayed_scale(history, now, E4M3, "max", 0) == torch.tensor(8.0) / 448
    assert delayed_scale(history, now, E4M3, "most_recent", 0) == torch.tensor(2.0) / 448
    assert delayed_scale(history, now, E4M3, "max", 2) == torch.tensor(32.0) / 448


def test_an_empty_history_means_current_scaling():
    scale = delayed_scale(torch.zeros(4), torch.tensor(3.0), E5M2, "max", 0)
    assert scale == torch.tensor(3.0) / 57344


def test_history_shifts_and_survives_a_bad_batch():
    history = torch.zeros(3)
    for amax in (1.0, 2.0, math.inf, math.nan, 4.0):
        push_amax(history, torch.tensor(amax))
    assert history.tolist() == [4.0, 2.0, 2.0]
