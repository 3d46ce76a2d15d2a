"""The kernels of `torch_fp8.kernels.messages`.

A program works on GROUPS groups of one message, or of the sum of all messages. Messages (N, B) are
`stride` bytes apart, a multiple of 16; each holds its codes, then its scales. Positions are
relative to the tile's first value: one 64-bit offset per program, then 32 bits per value.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.block_scaled import GRADIENT, decode, encode, scale_of
from torch_fp8.kernels.stochastic_rounding import random_words
from torch_fp8.kernels.tiles import LINE


@triton.jit
def _local(GROUPS: tl.constexpr):
    """Return the (GROUPS, 32) positions within a tile."""
    return tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _tile_of(message_ptr, tile, num_groups, GROUPS: tl.constexpr):
    """Return pointers to a tile's codes (GROUPS, 32) and scales (GROUPS,), and a mask."""
    first = tile.to(tl.int64) * GROUPS
    codes_ptr = tl.multiple_of(message_ptr + first * 32, 16)
    scales_ptr = message_ptr + num_groups.to(tl.int64) * 32 + first
    inside = tl.arange(0, GROUPS) < num_groups - tile * GROUPS
    codes_ptr = tl.max_contiguous(codes_ptr + _local(GROUPS), (1, LINE))
    return codes_ptr, scales_ptr + tl.arange(0, GROUPS), inside


@triton.jit
def _values_of(values_ptr, first, numel, inside, ALIGNED: tl.constexpr, GROUPS: tl.constexpr):
    """Return pointers (GROUPS, 32) to the values from `first` on in a flat buffer, and a mask."""
    left = tl.minimum(numel - first, GROUPS * 32).to(tl.int32)
    values_ptr = values_ptr + first
    if ALIGNED:
        left = left // 16 * 16  # no change; the compiler learns the divisibility
        values_ptr = tl.multiple_of(values_ptr, 16)
    local = _local(GROUPS)
    return values_ptr + local, inside[:, None] & (local < left)


@triton.jit
def _load(codes_ptr, scales_ptr, inside):
    """Decode codes and scales to (GROUPS, 32) float32."""
    codes = tl.load(codes_ptr, mask=inside[:, None], other=0)
    return decode(codes, tl.load(scales_ptr, mask=inside, other=127), GRADIENT)


@triton.jit
def _load_sum(codes_ptr, scales_ptr, inside, num_messages, stride):
    """Sum the groups of all messages, in their order, to (GROUPS, 32) float32."""
    total = _load(codes_ptr, scales_ptr, inside)
    step = tl.multiple_of(stride.to(tl.int64), 16)
    for _ in range(1, num_messages):
        codes_ptr += step
        scales_ptr += step
        total += _load(codes_ptr, scales_ptr, inside)
    return total


@triton.jit
def _store(
    x,
    first,
    codes_ptr,
    scales_ptr,
    inside,
    key0,
    key1,
    STOCHASTIC: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Encode and store (GROUPS, 32) float32; `first` is the index of the first value."""
    scale = scale_of(x, GRADIENT)
    if STOCHASTIC:
        index = first.to(tl.int32) + _local(GROUPS)
        bits = random_words(index, key0, key1) & 0xFFFF
        codes = encode(x, scale, bits << 4 | 8, GRADIENT)
    else:
        codes = encode(x, scale, None, GRADIENT)
    tl.store(codes_ptr, codes, mask=inside[:, None])
    tl.store(scales_ptr, scale, mask=inside)


# Not specialized on sizes and keys: one binary serves all of them, whatever their divisibility.
@triton.jit(do_not_specialize=["numel", "num_groups", "stride", "key0", "key1"])
def pack_kernel(
    values_ptr,
    messages_ptr,
    numel,
    num_groups,
    stride,
    key0,
    key1,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether 16 values can move at once
    GROUPS: tl.constexpr,
):
    """Encode groups of a flat buffer, padded with zeros, into this row's message."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    message_ptr = messages_ptr + row * stride
    codes_ptr, scales_ptr, inside = _tile_of(message_ptr, tile, num_groups, GROUPS)
    first = (row * num_groups + tile * GROUPS) * 32
    places, mask = _values_of(values_ptr, first, numel, inside, ALIGNED, GROUPS)
    x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    _store(x, first, codes_ptr, scales_ptr, inside, key0, key1, STOCHASTIC, GROUPS)


@triton.jit(do_not_specialize=["numel", "num_groups", "stride"])
def unpack_kernel(
    messages_ptr,
    values_ptr,
    numel,
    num_groups,
    stride,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Decode groups of this row's message into a flat buffer in the dtype of `values_ptr`."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    message_ptr = messages_ptr + row * stride
    codes_ptr, scales_ptr, inside = _tile_of(message_ptr, tile, num_groups, GROUPS)
    first = (row * num_groups + tile * GROUPS) * 32
    places, mask = _values_of(values_ptr, first, numel, inside, ALIGNED, GROUPS)
    x = _load(codes_ptr, scales_ptr, inside)
    tl.store(places, x.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_messages", "num_groups", "stride"])
def unpack_sum_kernel(
    messages_ptr,
    values_ptr,
    num_messages,
    num_groups,
    stride,
    scale,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write the sum over all messages, times `scale`, in the dtype of `values_ptr`."""
    tile = tl.program_id(0)
    codes_ptr, scales_ptr, inside = _tile_of(messages_ptr, tile, num_groups, GROUPS)
    total = _load_sum(codes_ptr, scales_ptr, inside, num_messages, stride) * scale
    first = tile.to(tl.int64) * (GROUPS * 32)
    places, mask = _values_of(values_ptr, first, first + GROUPS * 32, inside, ALIGNED, GROUPS)
    tl.store(places, total.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_messages", "num_groups", "stride", "key0", "key1"])
def reduce_and_repack_kernel(
    messages_ptr,
    combined_ptr,
    num_messages,
    num_groups,
    stride,
    scale,
    key0,
    key1,
    STOCHASTIC: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Encode the sum over all messages, times `scale`, into one message."""
    tile = tl.program_id(0)
    codes_ptr, scales_ptr, inside = _tile_of(messages_ptr, tile, num_groups, GROUPS)
    total = _load_sum(codes_ptr, scales_ptr, inside, num_messages, stride) * scale
    codes_ptr, scales_ptr, inside = _tile_of(combined_ptr, tile, num_groups, GROUPS)
    first = tile * (GROUPS * 32)
    _store(total, first, codes_ptr, scales_ptr, inside, key0, key1, STOCHASTIC, GROUPS)


@triton.jit(do_not_specialize=["num_messages", "count", "stride"])
def sum_plain_kernel(plain_ptr, out_ptr, num_messages, count, stride, scale, BLOCK: tl.constexpr):
    """Write the sum over BF16 rows that are `stride` elements apart, times `scale`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    plain_ptr += place
    total = tl.load(plain_ptr, mask=inside, other=0.0).to(tl.float32)
    for _ in range(1, num_messages):
        plain_ptr += stride.to(tl.int64)
        total += tl.load(plain_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (total * scale).to(out_ptr.dtype.element_ty), mask=inside)
