"""8-bit gradients on CUDA: the twin of `torch_fp8.ops.grad_codec`, byte for byte.

Legend: codes (R, K) uint8 and scales (R, ceil(K / 32)) uint8 of `formats.GRADIENT`. All tensors are
contiguous. Codes are unspecified in groups whose scale is NaN.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import GradientParts
from torch_fp8.kernels.block_scaled import GRADIENT, at_origin, decode, encode, places, scale_of
from torch_fp8.kernels.cast_launch import cdiv
from torch_fp8.kernels.fast_math import random_words
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import LINE
from torch_fp8.quantization.formats import GROUP_SIZE


# Not specialized on sizes and keys: one binary serves all of them, whatever their divisibility.
@partial(quick, changing=2)
@triton.jit(do_not_specialize=["num_groups", "cols", "key0", "key1"])
def encode_gradient_kernel(
    x_ptr,
    qdata_ptr,
    scale_ptr,
    multiplier_ptr,
    num_groups,
    cols,
    key0,
    key1,
    ACCUMULATE: tl.constexpr,  # whether to add the stored gradient times the multiplier
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Encode x in 8 bits, rounded with 16 random bits per element; x alone has the multiplier 1."""
    first = tl.program_id(0) * GROUPS
    local = tl.arange(0, GROUPS)
    inside = first + local < num_groups
    position, mask, row, col = places(first, local, num_groups, cols, LAYOUT)
    x_ptr = at_origin(x_ptr, first, cols, LAYOUT)
    qdata_ptr = at_origin(qdata_ptr, first, cols, LAYOUT)
    codes_ptr = tl.max_contiguous(qdata_ptr + position, (1, LINE))
    x = tl.load(x_ptr + position, mask=mask, other=0.0).to(tl.float32)
    if ACCUMULATE:
        codes = tl.load(codes_ptr, mask=mask, other=0)
        scale = tl.load(scale_ptr + first + local, mask=inside, other=127)
        x = decode(codes, scale, GRADIENT) * tl.load(multiplier_ptr) + x
    index = (row * cols)[:, None] + col
    bits = random_words(index, key0, key1) & 0xFFFF
    scale = scale_of(x, GRADIENT)
    tl.store(codes_ptr, encode(x, scale, bits << 4 | 8, GRADIENT), mask=mask)
    tl.store(scale_ptr + first + local, scale, mask=inside)
    if not ACCUMULATE and tl.program_id(0) == 0:
        tl.store(multiplier_ptr, 1.0)


@triton.jit(do_not_specialize=["num_groups", "cols"])
def decode_gradient_kernel(
    qdata_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,
    num_groups,
    cols,
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Decode the values, times the multiplier, into the dtype of `out_ptr`."""
    first = tl.program_id(0) * GROUPS
    local = tl.arange(0, GROUPS)
    position, mask, _, _ = places(first, local, num_groups, cols, LAYOUT)
    qdata_ptr = at_origin(qdata_ptr, first, cols, LAYOUT)
    out_ptr = at_origin(out_ptr, first, cols, LAYOUT)
    codes = tl.load(qdata_ptr + position, mask=mask, other=0)
    scale = tl.load(scale_ptr + first + local, mask=first + local < num_groups, other=127)
    x = decode(codes, scale, GRADIENT) * tl.load(multiplier_ptr)
    tl.store(out_ptr + position, x.to(out_ptr.dtype.element_ty), mask=mask)


GROUPS, ODD_GROUPS = 64, 16
# Groups per tile: 16 elements for each thread of four warps, in accesses of 16 bytes; 4 if elements
# move one by one, each with an address and a mask.
WARPS = 4


def encode_gradient(
    x: Tensor, parts: GradientParts, keys: tuple[int, int], accumulate: bool
) -> None:
    """Encode a gradient with stochastic rounding, or its sum with the stored one.

    Args:
        x: (R, K) bfloat16 or float32, not empty.
        parts: an (R, K) gradient, whose codes and scales are overwritten; the result's multiplier
            is 1. That of the stored gradient is only read to accumulate, else it is set to 1.
        keys: keys of the random words; an element's word depends on its index in x.
        accumulate: whether to add x to the stored gradient.
    """
    _launch_groups(encode_gradient_kernel, x, parts, (x, *parts), *keys, ACCUMULATE=accumulate)


def dequantize_gradient(parts: GradientParts, dtype: torch.dtype) -> Tensor:
    """Decode a gradient to (R, K) bfloat16 or float32."""
    out = torch.empty(parts.qdata.shape, dtype=dtype, device=parts.qdata.device)
    if out.numel():
        _launch_groups(decode_gradient_kernel, out, parts, (*parts, out))
    return out


def _launch_groups(
    kernel: Any, x: Tensor, parts: GradientParts, tensors: tuple[Any, ...], *keys: int, **flags: Any
) -> None:
    """Launch a kernel on the groups of values x and their codes."""
    qdata, cols, layout, groups = parts.qdata, x.shape[1], "any", ODD_GROUPS
    assert x.is_contiguous()
    assert qdata.is_contiguous()
    if cols % 16 == x.data_ptr() % 16 == qdata.data_ptr() % 16 == 0:
        layout, groups = "flat" if cols % GROUP_SIZE == 0 else "rows", GROUPS
    count = parts.scale.shape[0] * parts.scale.shape[1]
    launch = partial(kernel[(cdiv(count, groups),)], *tensors, count, cols, *keys, **flags)
    options = {"LAYOUT": layout, "GROUPS": groups, "num_warps": WARPS, "enable_fp_fusion": False}
    if x.device.index is None or x.device.index == torch.cuda.current_device():
        launch(**options)  # the usual case: torch changes devices in Python
    else:
        with torch.cuda.device_of(x):
            launch(**options)
