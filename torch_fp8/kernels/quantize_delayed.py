"""Casts with delayed scaling on CUDA: the twin of `torch_fp8.ops.quantize_delayed`'s references.

One launch reads x once: it derives the scale from the amaxes of the past, writes both layouts,
takes the amax and records it. Recording must wait until no program reads the history any more, and
until the amax is of all tiles: the last program to be done has the history to itself
(`torch_fp8.kernels.delayed_scale`). Nobody waits on the host to learn whether a history is empty,
and no launch is spent on counters. Producers that cast with delayed scaling end in the same way,
but leave the recording to who reads what they made.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import DelayedCastOptions
from torch_fp8.kernels.column_sums import TileSums
from torch_fp8.kernels.delayed_scale import count_in, delayed_scale, past_amax, record_amax
from torch_fp8.kernels.fp8_cast import abs_bits, largest_bits
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import (
    BLOCK,
    ODD_BLOCK,
    ODD_WARPS,
    TILE_WARPS,
    is_odd,
    pad_columns,
    pad_of,
)
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import load_tile, store_scaled, store_sums, tile_at
from torch_fp8.quantization.formats import format_of


@quick
@triton.jit
def cast_delayed_kernel(
    x_ptr,
    history_ptr,
    progress_ptr,  # largest bits so far, programs that are done: both 0 between launches
    scale_ptr,
    last_ptr,
    row_ptr,
    col_ptr,
    sum_ptr,
    stride_r,
    stride_c,
    rows,
    cols,
    length,
    headroom,
    E5M2: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    LAST: tl.constexpr,  # whether the scale is stored at last_ptr, too
    ROW: tl.constexpr,
    COL: tl.constexpr,
    PAD: tl.constexpr,
    SUM_AXIS: tl.constexpr,  # along which the tile's sums are stored, or -1
    BLOCK_SIZE: tl.constexpr,
):
    """Cast one tile of x in the layouts asked for; the last program records the amax."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_SIZE, BLOCK_SIZE)
    made = (row_ptr, scale_ptr, col_ptr, scale_ptr)
    x = load_tile(x_ptr, stride_r, stride_c, tile[2], tile[3], tile[4])
    store_sums(x, sum_ptr, tile, rows, cols, SUM_AXIS)
    past = past_amax(history_ptr, length, MOST_RECENT)
    scale = delayed_scale(past, headroom, E5M2)
    largest = largest_bits(x)
    if (past != 0) | (largest == 0):
        store_scaled(x, scale, made, tile, rows, cols, E5M2, ROW, COL, PAD)

    is_last, amax = count_in(progress_ptr, largest, tl.num_programs(0))
    if is_last:
        if past == 0:
            scale = delayed_scale(amax, headroom, E5M2)
            tiles = tl.num_programs(0)
            if amax == 0:
                tiles = 0
            for index in range(0, tiles):
                other = tile_at(index, rows, cols, BLOCK_SIZE, BLOCK_SIZE)
                y = load_tile(x_ptr, stride_r, stride_c, other[2], other[3], other[4])
                store_scaled(y, scale, made, other, rows, cols, E5M2, ROW, COL, PAD)
        tl.store(scale_ptr, scale)
        if LAST:
            tl.store(last_ptr, scale)
        record_amax(history_ptr, length, amax, past, MOST_RECENT)


@quick
@triton.jit
def advance_history_kernel(
    history_ptr,
    amax_ptr,
    scale_ptr,
    last_ptr,
    length,
    headroom,
    E5M2: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    LAST: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Compute the scale in one program, and record an amax that is known already if asked to."""
    amax = abs_bits(tl.load(amax_ptr))
    past = past_amax(history_ptr, length, MOST_RECENT)
    scale = delayed_scale(tl.where(past != 0, past, amax), headroom, E5M2)
    tl.debug_barrier()
    tl.store(scale_ptr, scale)
    if LAST:
        tl.store(last_ptr, scale)
    if RECORD:
        record_amax(history_ptr, length, amax, past, MOST_RECENT)


def quantize_2d_delayed(
    x: Tensor,
    options: DelayedCastOptions,
    last: Tensor | None,
    sums: TileSums | None = None,
    pads: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Cast x with the scale that its history suggests, and record its amax, in one launch.

    Args:
        x: (R, C) float32, bfloat16 or float16, any strides, not empty.
        options: how; the history, contiguous, is written.
        last: () float32 that receives the scale, or None.
        sums: filled, if given.
        pads: whether the column layout is padded; else it is (C, R).
    Returns:
        qdata (R, C) or None, scale () float32, qdata of x^T (C, R') or None.
    """
    history, progress, dtype, algorithm, margin, row, col = options
    if x.stride(1) != 1 and x.stride(0) == 1:  # loads run along the contiguous dimension
        if sums is not None:
            sums.turn()
        turned = options._replace(rowwise=col, columnwise=row)
        by_col, scale, by_row = quantize_2d_delayed(x.t(), turned, last, sums, pads=False)
        if sums is not None:
            sums.turn()
        return by_row, scale, pad_columns(by_col, "tensorwise")
    rows, cols = x.shape
    # In whole tiles E5M2 with the newest amax, or with rows to pad, spilled: no register was left.
    pad = pad_of(rows, "tensorwise", pads)
    spills = format_of(dtype).has_inf and row and col and (algorithm == "most_recent" or pad > 1)
    small = is_odd(x) or spills
    block, warps = (ODD_BLOCK, ODD_WARPS) if small else (BLOCK, TILE_WARPS)
    by_row = x.new_empty((rows, cols), dtype=dtype) if row else None
    by_col = x.new_empty((cols, cdiv(rows, pad) * pad), dtype=dtype) if col else None
    scale = x.new_empty((), dtype=torch.float32)
    partial = scale
    if sums is not None:
        partial = sums.allocate(x, cdiv(x.shape[sums.axis], block))
    with torch.cuda.device_of(x):
        cast_delayed_kernel[(cdiv(rows, block) * cdiv(cols, block),)](
            x,
            history,
            progress,
            scale,
            scale if last is None else last,
            scale if by_row is None else by_row.view(torch.uint8),
            scale if by_col is None else by_col.view(torch.uint8),
            partial,
            *x.stride(),
            rows,
            cols,
            history.shape[0],
            2.0**margin,
            E5M2=format_of(dtype).has_inf,
            MOST_RECENT=algorithm == "most_recent",
            LAST=last is not None,
            ROW=row,
            COL=col,
            PAD=pad,
            SUM_AXIS=-1 if sums is None else sums.axis,
            BLOCK_SIZE=block,
            num_warps=warps,
        )
    return by_row, scale, by_col


def advance_history(
    history: Tensor,
    last: Tensor | None,
    amax: Tensor,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
    record: bool = True,
) -> Tensor:
    """Return the history's scale, () float32, and record `amax` (), in one launch.

    Args:
        history: (H,) float32, contiguous, the most recent amax first; written.
        last: () float32 that receives the scale, or None.
        dtype, algorithm, margin: see `torch_fp8.kernels.arguments.DelayedCastOptions`.
        amax: () float32 of the tensor at hand, used while the history is empty.
        record: False: the history stays as it is.
    """
    scale = torch.empty_like(amax)
    with torch.cuda.device_of(history):
        advance_history_kernel[(1,)](
            history,
            amax,
            scale,
            scale if last is None else last,
            history.shape[0],
            2.0**margin,
            E5M2=format_of(dtype).has_inf,
            MOST_RECENT=algorithm == "most_recent",
            LAST=last is not None,
            RECORD=record,
            num_warps=4,
        )
    return scale
