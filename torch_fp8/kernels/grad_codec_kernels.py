"""The kernels of `torch_fp8.kernels.grad_codec`.

A program works on a tile of GROUPS groups of one matrix (R, K); see `block_layout` for positions.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.block_layout import at_origin, places
from torch_fp8.kernels.block_scaled import GRADIENT, decode, encode, scale_of
from torch_fp8.kernels.stochastic_rounding import random_words
from torch_fp8.kernels.tiles import LINE


# Not specialized on sizes and keys: one binary serves all of them, whatever their divisibility.
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
    """Encode x in 8 bits, rounded with 16 random bits per element."""
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
