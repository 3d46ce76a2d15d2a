"""The kernels of `torch_fp8.kernels.quantize`.

Legend: R rows, C columns of x; ``row`` is x quantized along C; ``col`` is x^T quantized along R,
padded with zeros to a multiple of PAD columns (`torch_fp8.quantization.payload_shape`), so that its
rows are aligned for wide stores. A program works on a tile of x in registers; the launcher chooses
all sizes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.cast_launch import cdiv
from torch_fp8.kernels.fp8_cast import (
    abs_bits,
    cast_bounded,
    cast_saturating,
    largest_bits,
    scale_from_amax,
)
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import (
    LINE,
    load_tile,
    positions,
    push_amax,
    store_blocks,
    store_layouts,
    store_sums,
    tile_at,
)


@quick
@triton.jit(do_not_specialize=["num_tiles"])
def amax_kernel(
    x_ptr,
    partial_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    num_tiles,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write into partial[p] the maximum of abs_bits over the tiles p, p + P, ... of P programs."""
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        _, _, r, c, mask = tile_at(tile, rows, cols, BLOCK_R, BLOCK_C)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        largest = tl.maximum(largest, abs_bits(x))
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


@quick
@triton.jit
def column_amax_kernel(
    x_ptr,
    partial_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    rows_per_slab,
    sum_ptr,
    SUMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the maximum of abs_bits over slab s's rows into partial[s, c], and the sum of x over
    them into sum[s, c] if SUMS.
    """
    c = positions(tl.program_id(0), BLOCK_C)
    slab = tl.program_id(1)
    first = slab.to(tl.int64) * rows_per_slab
    last = tl.minimum(first + rows_per_slab, rows)
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(first, last, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (r[:, None] < last) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        largest = tl.maximum(largest, abs_bits(x))
        if SUMS:
            total += x
    offsets = slab.to(tl.int64) * cols + c
    tl.store(partial_ptr + offsets, tl.max(largest, axis=0), mask=c < cols)
    if SUMS:
        tl.store(sum_ptr + offsets, tl.sum(total, axis=0), mask=c < cols)


@quick
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def cast_kernel(
    x_ptr,
    scale_ptr,
    partial_ptr,
    amax_ptr,
    row_ptr,
    col_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    num_partials,
    sum_ptr,
    SUM_AXIS: tl.constexpr,  # axis of the tile's sums, or -1 for none
    SCALE: tl.constexpr,  # "given", "tensor" (from partials of amax_kernel), "whole", "columns"
    AMAX: tl.constexpr,  # whether to raise an amax; only with "given"
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    PAD: tl.constexpr,
    PARTIALS: tl.constexpr,  # a power of two, at least num_partials
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast one tile of x to the requested layouts, with a scale per tensor or per column.

    SCALE: if "whole", the tile is all of x; if "columns", `partial_ptr` has an amax per slab.
    """
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    tile_r, tile_c, r, c, mask = tile
    x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    store_sums(x, sum_ptr, tile, rows, cols, SUM_AXIS)

    if AMAX:
        push_amax(amax_ptr, x)
    if SCALE == "given":
        scale = tl.load(scale_ptr)
    elif SCALE == "whole":
        scale = scale_from_amax(largest_bits(x), FMAX, POWER_OF_TWO)
        tl.store(scale_ptr, scale)
    elif SCALE == "tensor":
        p = tl.arange(0, PARTIALS)
        partials = tl.load(partial_ptr + p, mask=p < num_partials, other=0)
        scale = scale_from_amax(tl.max(partials, axis=0), FMAX, POWER_OF_TWO)
        if tile_r + tile_c == 0:
            tl.store(scale_ptr, scale)
    else:
        p = tl.arange(0, PARTIALS)
        partials = tl.load(
            partial_ptr + p[:, None].to(tl.int64) * cols + c[None, :],
            mask=(p[:, None] < num_partials) & (c[None, :] < cols),
            other=0,
        )
        scale = scale_from_amax(tl.max(partials, axis=0), FMAX, POWER_OF_TWO)
        tl.store(scale_ptr + c, scale, mask=(c < cols) & (tile_r == 0))
        scale = scale[None, :]

    if SCALE == "given":
        q = cast_saturating(x, scale, E5M2)
    else:
        q = cast_bounded(x, scale, E5M2, POWER_OF_TWO)
    store_layouts(
        q,
        row_ptr,
        col_ptr,
        tile,
        rows,
        cols,
        ROW,
        COL,
        PAD,
        LINES=True,
        PLAIN_PADS=SCALE == "columns",
    )


@quick
@triton.jit
def quantize_rows_kernel(
    x_ptr,
    row_ptr,
    scale_ptr,
    after_ptr,  # not read, see `CastOptions.after`
    stride_r,
    stride_c,
    rows,
    cols,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IN_REGISTERS: tl.constexpr,  # BLOCK_C >= cols: x is read once
):
    """Cast BLOCK_R whole rows, each with its own scale."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    r = positions(tl.program_id(0), BLOCK_R)
    c = tl.arange(0, BLOCK_C).to(tl.int64)
    if IN_REGISTERS:
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        scale = scale_from_amax(tl.max(abs_bits(x), axis=1), FMAX, POWER_OF_TWO)
        q = cast_bounded(x, scale[:, None], E5M2, POWER_OF_TWO)
        tl.store(
            tl.max_contiguous(row_ptr + r[:, None] * cols + c[None, :], (1, LINE)), q, mask=mask
        )
    else:
        largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
        for start in range(0, cols, BLOCK_C):
            mask = (r[:, None] < rows) & (start + c[None, :] < cols)
            x = load_tile(x_ptr, stride_r, stride_c, r, start + c, mask)
            largest = tl.maximum(largest, abs_bits(x))
        scale = scale_from_amax(tl.max(largest, axis=1), FMAX, POWER_OF_TWO)
        for start in range(0, cols, BLOCK_C):
            mask = (r[:, None] < rows) & (start + c[None, :] < cols)
            x = load_tile(x_ptr, stride_r, stride_c, r, start + c, mask)
            q = cast_bounded(x, scale[:, None], E5M2, POWER_OF_TWO)
            places = row_ptr + r[:, None] * cols + start + c[None, :]
            tl.store(tl.max_contiguous(places, (1, LINE)), q, mask=mask)
    tl.store(scale_ptr + r, scale, mask=r < rows)


@quick
@triton.jit
def quantize_blocks_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    sum_ptr,
    SUM_AXIS: tl.constexpr,  # axis of the tile's sums, or -1 for none
    SCALE: tl.constexpr,  # "square" or "groups" of GROUP; see `store_blocks`
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast one tile of x, made of whole blocks, to the requested layouts; one scale per block."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    x = load_tile(x_ptr, stride_r, stride_c, tile[2], tile[3], tile[4])
    store_sums(x, sum_ptr, tile, rows, cols, SUM_AXIS)
    made = (row_ptr, row_scale_ptr, col_ptr, col_scale_ptr)
    store_blocks(
        x, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL, PAD, LINES=True
    )


# Narrow blocks of columns fill the GPU; 64 rows at a time keep 16 loads in flight per thread.
BLOCK_ROWS = 64
BLOCK_COLS = 32


@quick
@triton.jit(do_not_specialize=["num_partials"])
def reduce_sums_kernel(
    partial_ptr, sum_ptr, num_partials, size, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Compute sum[c], the sum of partial[p, c] over all p."""
    c = positions(tl.program_id(0), BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(0, num_partials, BLOCK_R):
        p = start + tl.arange(0, BLOCK_R).to(tl.int64)
        mask = (p[:, None] < num_partials) & (c[None, :] < size)
        total += tl.load(partial_ptr + p[:, None] * size + c[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + c, tl.sum(total, axis=0), mask=c < size)


@dataclass
class TileSums:
    """Partial sums over the rows of x, or over its columns, one for each tile.

    Attributes:
        axis: 0 to sum over the rows of the matrix that is read, 1 to sum over its columns.
        partial: (tiles, columns or rows) float32, or None before a cast has allocated it.
    """

    axis: int = 0
    partial: Tensor | None = None

    def allocate(self, x: Tensor, tiles: int) -> Tensor:
        """Allocate memory for the sums of `tiles` tiles along the axis."""
        self.partial = x.new_empty((tiles, x.shape[1 - self.axis]), dtype=torch.float32)
        return self.partial

    def total(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums over the rows of x, added in float32 and rounded once to `dtype`."""
        if self.partial is None:  # the cast did not run in tiles
            return x.sum(0, dtype=torch.float32).to(dtype)
        size = self.partial.shape[1]
        total = x.new_empty(size, dtype=dtype)
        reduce_sums_kernel[(cdiv(size, BLOCK_COLS),)](
            self.partial,
            total,
            *self.partial.shape,
            BLOCK_R=BLOCK_ROWS,
            BLOCK_C=BLOCK_COLS,
            num_warps=4,
        )
        return total
