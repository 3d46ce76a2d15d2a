"""Weights cast as one transposed payload on CUDA: the twin of `torch_fp8.ops.side_by_side`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.cast_launch import BLOCK, TILE_WARPS, cdiv, pointers
from torch_fp8.kernels.fp8_cast import cast_saturating
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import load_tile, positions
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.payload_shape import new_scale


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
