"""Messages on CUDA: the twin of `torch_fp8.ops.messages`, byte for byte.

Codes are unspecified in groups whose scale is NaN.

A program works on GROUPS groups of one message, or of the sum of all messages. Messages (N, B) are
`stride` bytes apart, a multiple of 16; each holds its codes, then its scales. Positions are
relative to the tile's first value: one 64-bit offset per program, then 32 bits per value.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.block_scaled import GRADIENT, decode, encode, scale_of
from torch_fp8.kernels.cast_launch import cdiv
from torch_fp8.kernels.fast_math import random_words
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
@triton.jit(do_not_specialize=["numel", "num_groups", "stride"])
def pack_kernel(
    values_ptr,
    messages_ptr,
    numel,
    num_groups,
    stride,
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
    _store(x, first, codes_ptr, scales_ptr, inside, 0, 0, False, GROUPS)


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


Keys = tuple[int, int]

GROUPS, ODD_GROUPS = 64, 16
# Groups per tile: 16 values for each thread of four warps, in accesses of 16 bytes; 4 if values
# move one by one.
PLAIN = 1024
WARPS = 4


def _launch_all(kernel: Any, grid: tuple[int, ...], *arguments: Any, **flags: Any) -> None:
    """Launch a kernel on the device of its first argument, unless there is no group."""
    if grid[0]:
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **flags, num_warps=WARPS, enable_fp_fusion=False)


def pack(values: Tensor, layout: Any, messages: Tensor) -> None:
    """Encode the groups of a flat buffer into messages; see `ops.messages.pack_flat`."""
    aligned, groups = _tile(values)
    grid = cdiv(layout.num_groups, groups), messages.shape[0]
    sizes = values.numel(), layout.num_groups, messages.stride(0)
    _launch_all(pack_kernel, grid, values, messages, *sizes, ALIGNED=aligned, GROUPS=groups)


def unpack(messages: Tensor, layout: Any, values: Tensor) -> None:
    """Decode the groups of messages into a flat buffer, which may end before the last group."""
    if values.numel():
        aligned, groups = _tile(values)
        grid = cdiv(layout.num_groups, groups), messages.shape[0]
        sizes = values.numel(), layout.num_groups, messages.stride(0)
        _launch_all(unpack_kernel, grid, messages, values, *sizes, ALIGNED=aligned, GROUPS=groups)


def unpack_sum(messages: Tensor, layout: Any, out: Tensor, scale: float) -> None:
    """Write the sum over the messages, times `scale`, into `out`."""
    aligned, groups = _tile(out)
    grid, flags = (cdiv(layout.num_groups, groups),), {"ALIGNED": aligned, "GROUPS": groups}
    sizes = messages.shape[0], layout.num_groups, messages.stride(0)
    _launch_all(unpack_sum_kernel, grid, messages, out, *sizes, float(scale), **flags)


def reduce_and_repack(
    messages: Tensor,
    layout: Any,
    combined: Tensor,
    scale: float,
    keys: Keys | None,
) -> None:
    """Encode the sum over the messages, times `scale`, into the message `combined` (1, B)."""
    grid = (cdiv(layout.num_groups, GROUPS),)
    sizes = messages.shape[0], layout.num_groups, messages.stride(0)
    numbers = *sizes, float(scale), *(keys or (0, 0))
    flags = {"STOCHASTIC": keys is not None, "GROUPS": GROUPS}
    _launch_all(reduce_and_repack_kernel, grid, messages, combined, *numbers, **flags)


def sum_plain(plain: Tensor, out: Tensor, scale: float) -> None:
    """Write the sum over the rows of `plain` (N, P) bfloat16, times `scale`, into `out` (P,)."""
    assert out.stride(0) == 1
    grid, sizes = (cdiv(out.numel(), PLAIN),), (plain.shape[0], out.numel(), plain.stride(0))
    _launch_all(sum_plain_kernel, grid, plain, out, *sizes, float(scale), BLOCK=PLAIN)


def _tile(values: Tensor) -> tuple[bool, int]:
    """Return whether 16 values can be moved at once, and the groups of a tile."""
    aligned = values.numel() % 16 == 0 and values.data_ptr() % 16 == 0
    return aligned, GROUPS if aligned else ODD_GROUPS
