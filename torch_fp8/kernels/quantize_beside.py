"""A cast and the transpose of a payload on CUDA, in one launch.

Both are memory-bound and independent of each other. Some programs cast a tile as `cast_kernel`
does, the others transpose one as `transpose_kernel` does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    TILE_WARPS,
    amax_slot,
    cast_flags,
    cdiv,
    is_odd,
    pad_of,
    pointers,
    whole_tile,
)
from torch_fp8.kernels.quantize import AMAX_PROGRAMS, partial_amaxes, quantize_2d
from torch_fp8.kernels.quantize_kernels import cast_kernel
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.transpose import transpose_tile, transposed_bytes


@quick
@triton.jit(
    do_not_specialize=["programs"], do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"]
)
def cast_beside_kernel(
    x_ptr,
    scale_ptr,
    partial_ptr,
    amax_ptr,
    row_ptr,
    col_ptr,
    payload_ptr,
    out_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    num_partials,
    programs,
    payload_rows,
    payload_cols,
    SCALE: tl.constexpr,
    AMAX: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    PAD: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast a tile of x in the first `programs` programs; transpose one of a payload in the others.

    Args: see `cast_kernel`; the sizes of the payload are multiples of 16.
    """
    index = tl.program_id(0)
    if index < programs:
        cast_kernel(
            *(x_ptr, scale_ptr, partial_ptr, amax_ptr, row_ptr, col_ptr, stride_r, stride_c),
            *(rows, cols, num_partials, scale_ptr, -1, SCALE, AMAX, E5M2, POWER_OF_TWO, ROW, COL),
            *(PAD, PARTIALS, BLOCK, BLOCK),
        )
    else:
        tile, tiles_c = index - programs, tl.cdiv(payload_cols, BLOCK)
        transpose_tile(
            *(tile // tiles_c, tile % tiles_c, payload_ptr, out_ptr),
            *(payload_rows, payload_cols, payload_rows, BLOCK, True),
        )


def quantize_2d_beside(
    x: Tensor, options: CastOptions, payload: Tensor
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.quantize_beside.quantize_2d_beside`."""
    if not _fits(x, options, payload):
        layouts = quantize_2d(x, options)
        after = next(t for t in layouts if t is not None)
        return (*layouts, transposed_bytes(payload, payload.shape[0], after))
    layouts, (rows, cols) = options.new_layouts(x), x.shape
    transpose = payload.new_empty((payload.shape[1], payload.shape[0]))
    by_row, new, by_col, _ = layouts
    partial, scale, programs = None, options.scale, cdiv(rows, BLOCK) * cdiv(cols, BLOCK)
    if scale is None:
        scale, amax = new, options.amax
        partial = partial_amaxes(x) if amax is None else amax.view(1).view(torch.int32)
    num_partials = 1 if partial is None else partial.shape[0]
    slot = amax_slot(options)
    unused = scale if slot is None else slot  # in a graph the scale may be a view, a call for each
    cast_beside_kernel[(programs + cdiv(payload.shape[0], BLOCK) * cdiv(payload.shape[1], BLOCK),)](
        x,
        scale,
        *pointers((partial, slot, by_row, by_col, payload, transpose), unused),
        *x.stride(),
        *x.shape,
        num_partials,
        programs,
        *payload.shape,
        SCALE="given" if partial is None else "tensor",
        AMAX=slot is not None,
        **cast_flags(options if partial is not None else options._replace(power_of_two=False)),
        PAD=pad_of(rows, "tensorwise", True),
        PARTIALS=AMAX_PROGRAMS if num_partials > 1 else 1,
        BLOCK=BLOCK,
        num_warps=TILE_WARPS,
    )
    return (*layouts, transpose)


def _fits(x: Tensor, options: CastOptions, payload: Tensor) -> bool:
    """Return whether a cast in tiles of full size, and a transpose of whole lines, will do."""
    if is_odd(x) or not x.numel() or payload.shape[0] % 16 or payload.shape[1] % 16:
        return False
    if options.scale is None:
        return options.amax is not None or whole_tile(x, options.columnwise) is None
    return pad_of(x.shape[0], "tensorwise", True) == 1
