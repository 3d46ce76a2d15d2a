"""Matrices cast side by side into one payload on CUDA: the twin of `torch_fp8.ops.side_by_side`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    TILE_WARPS,
    amax_slot,
    cdiv,
    fits_tiles,
    pointers,
)
from torch_fp8.kernels.fp8_cast import cast_saturating
from torch_fp8.kernels.quantize import quantize_2d
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import load_tile, padded, positions, push_amax, store_layouts
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.payload_shape import Layouts, new_scale


@quick
@triton.jit(
    do_not_specialize_on_alignment=["scale_a_ptr", "scale_b_ptr", "scale_c_ptr", "after_ptr"]
)
def cast_side_by_side_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    scale_a_ptr,
    scale_b_ptr,
    scale_c_ptr,
    after_ptr,  # not read: a graph launches the kernel after it is written
    out_ptr,
    scale_ptr,
    rows_a,
    rows_b,
    rows_c,
    cols,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast one tile of a, b or c (R, C), contiguous, into its columns of out (C, Ra + Rb + Rc).

    Tiles are counted along the rows of a, then of b and c, of which c may have no rows. All sizes
    are multiples of 16.
    """
    scale = tl.maximum(tl.load(scale_a_ptr), tl.load(scale_b_ptr))
    scale = tl.maximum(scale, tl.load(scale_c_ptr))
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    tiles_c = tl.cdiv(cols, BLOCK)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    x_ptr, rows, start = a_ptr, rows_a, 0 * rows_a
    if tile_r >= tl.cdiv(rows_a, BLOCK):
        tile_r -= tl.cdiv(rows_a, BLOCK)
        x_ptr, rows, start = b_ptr, rows_b, rows_a
        if tile_r >= tl.cdiv(rows_b, BLOCK):
            tile_r -= tl.cdiv(rows_b, BLOCK)
            x_ptr, rows, start = c_ptr, rows_c, rows_a + rows_b
    r = tl.max_contiguous(tl.multiple_of(positions(tile_r, BLOCK), 16), 16)
    c = tl.max_contiguous(tl.multiple_of(positions(tile_c, BLOCK), 16), 16)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    q = cast_saturating(load_tile(x_ptr, cols, 1, r, c, mask), scale, E5M2)
    total = rows_a + rows_b + rows_c
    tl.store(out_ptr + c[None, :] * total + (start + r)[:, None], q, mask=mask)


def cast_side_by_side(
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    scale_a: Tensor,
    scale_b: Tensor | None,
    scale_c: Tensor | None,
    dtype: torch.dtype,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.ops.side_by_side.cast_side_by_side`; sizes are multiples of 16."""
    weights = [x.contiguous() for x in (a, b, c) if x is not None]
    rows, cols = [x.shape[0] for x in weights], a.shape[1]
    out = a.new_empty((cols, sum(rows)), dtype=dtype)
    scale = new_scale(a)
    tiles = sum(cdiv(n, BLOCK) for n in rows) * cdiv(cols, BLOCK)
    cast_side_by_side_kernel[(tiles,)](
        *weights,
        *weights[:1] * (3 - len(weights)),
        scale_a,
        *pointers((scale_b, scale_c, after, out), scale_a),
        scale,
        *rows,
        *[0] * (3 - len(rows)),
        cols,
        E5M2=format_of(dtype).has_inf,
        BLOCK=BLOCK,
        num_warps=TILE_WARPS,
    )
    return out, scale


@quick
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def cast_joined_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    scale_ptr,
    amax_ptr,
    q_ptr,
    qt_ptr,
    rows,
    cols_a,
    cols_b,
    cols_c,
    E5M2: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast one tile of a, b or c (R, C), contiguous, into its columns of q (R, Ca + Cb + Cc).

    Columns are multiples of 16. AMAX: whether to raise the slot to the amax of all.
    """
    tiles_a, tiles_b = tl.cdiv(cols_a, BLOCK), tl.cdiv(cols_b, BLOCK)
    tiles_c = tiles_a + tiles_b + tl.cdiv(cols_c, BLOCK)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    x_ptr, cols, start = a_ptr, cols_a, 0 * cols_a
    if tile_c >= tiles_a:
        tile_c -= tiles_a
        x_ptr, cols, start = b_ptr, cols_b, cols_a
        if tile_c >= tiles_b:
            tile_c -= tiles_b
            x_ptr, cols, start = c_ptr, cols_c, cols_a + cols_b
    r, c = positions(tile_r, BLOCK), positions(tile_c, BLOCK)
    c = tl.max_contiguous(tl.multiple_of(c, 16), 16)
    tile = (tile_r, tile_c, r, c, (r[:, None] < rows) & (c[None, :] < cols))
    x = load_tile(x_ptr, cols, 1, r, c, tile[4])
    if AMAX:
        push_amax(amax_ptr, x)
    q, total = cast_saturating(x, tl.load(scale_ptr), E5M2), cols_a + cols_b + cols_c
    qt_ptr += start.to(tl.int64) * padded(rows, 16)
    store_layouts(q, q_ptr + start, qt_ptr, tile, rows, total, ROW, COL, 16, cols)


def quantize_joined(a: Tensor, b: Tensor | None, c: Tensor | None, options: CastOptions) -> Layouts:
    """See `torch_fp8.ops.side_by_side.quantize_joined`."""
    parts = [x.contiguous() for x in (a, b, c) if x is not None]
    cols = [x.shape[1] for x in parts]
    if options.scale is None or not all(fits_tiles(options, x) for x in parts):
        return quantize_2d(torch.cat(parts, 1), options)
    layouts, slot = options.new_layouts(a, sum(cols)), amax_slot(options)
    tiles = sum(cdiv(n, BLOCK) for n in cols) * cdiv(a.shape[0], BLOCK)
    cast_joined_kernel[(tiles,)](
        *parts,
        *parts[:1] * (3 - len(parts)),
        options.scale,
        *pointers((slot, layouts[0], layouts[2]), a),
        a.shape[0],
        *cols,
        *[0] * (3 - len(cols)),
        E5M2=format_of(options.dtype).has_inf,
        ROW=options.rowwise,
        COL=options.columnwise,
        AMAX=slot is not None,
        BLOCK=BLOCK,
        num_warps=TILE_WARPS,
    )
    return layouts
