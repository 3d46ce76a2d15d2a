"""A cast with a given scale raises the slot beside it; the kernels are compared elsewhere."""

import itertools

import pytest
import torch

from tests.internals import CastOptions, tensor_amax
from torch_fp8.ops.quantize import quantize_2d, quantize_2d_sum

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ((True, True), (True, False), (False, True), (False, False))
INPUTS = {
    "one element": torch.full((1, 1), -3.0),
    "odd": torch.randn(37, 131),
    "bf16": torch.randn(64, 48).bfloat16(),
    "fp16": torch.randn(64, 48).half(),
    "transposed": torch.randn(150, 70).bfloat16().t(),
    "sliced": torch.randn(60, 90)[1::2, ::3],
    "expanded": torch.randn(1, 96).expand(20, 96),
    "no rows": torch.zeros(0, 48),
    "no columns": torch.zeros(48, 0),
    "zeros": torch.zeros(20, 40),
    "infinite": torch.tensor([[1.0, -float("inf")]]),
    "NaN": torch.tensor([[float("inf"), float("nan")]]),
}


def same(a, b):
    """Bit for bit; NaN equals NaN."""
    return torch.equal(a.float().nan_to_num(1e9), b.float().nan_to_num(1e9))


@pytest.mark.parametrize("name", INPUTS)
def test_a_slot_is_raised_and_the_bytes_are_the_same(name):
    x, scale = INPUTS[name], torch.tensor(0.01)
    for dtype, layouts, before in itertools.product(FORMATS, LAYOUTS, (0.0, 2.0, float("nan"))):
        options = CastOptions(dtype, "tensorwise", False, *layouts, scale)
        slot = torch.tensor(before)
        made = quantize_2d(x, options._replace(amax=slot))
        assert all(same(a, b) for a, b in zip(made, quantize_2d(x, options), strict=True))
        assert same(slot, torch.maximum(torch.tensor(before), tensor_amax(x)))
        assert slot.isnan() == (name == "NaN" or before != before)


def test_a_cast_that_adds_up_rows_raises_its_slot():
    x, scale = torch.randn(20, 40), torch.tensor(0.01)
    options = CastOptions(FORMATS[1], "tensorwise", False, True, True, scale, torch.zeros(()))
    *made, sums = quantize_2d_sum(x, options, torch.float32)
    assert same(options.amax, x.abs().max())
    assert same(sums, x.sum(0))
    want = quantize_2d(x, options._replace(amax=None))
    assert all(same(a, b) for a, b in zip(made, want, strict=True))


def test_an_amax_without_a_scale_is_read_and_stays():
    x, amax = torch.randn(20, 40) * 100, torch.ones(())
    _, scale, *_ = quantize_2d(
        x, CastOptions(FORMATS[0], "tensorwise", False, True, True, None, amax)
    )
    assert amax == 1
    assert scale == torch.tensor(1.0) / 448
