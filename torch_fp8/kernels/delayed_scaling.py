"""Casts with delayed scaling on CUDA: the twin of `torch_fp8.delayed_scaling`'s references.

One launch reads x once: it derives the scale from the amaxes of the past, writes both layouts,
takes the amax and records it. Recording must wait until no program reads the history any more, and
until the amax is of all tiles. Hence each program, when it is done, counts itself in; the last one
has the history to itself. It also sets the two counters back, so that no launch is spent on that.

Where the history is empty the scale is that of x itself, which only the last program knows: it then
casts all of x, alone. That takes milliseconds, once in a training run, for a history is empty until
something other than zeros was seen, and zeros need no scale: each program casts those itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.formats import format_of
from torch_fp8.kernels.grid import cdiv
from torch_fp8.kernels.quantize import BLOCK, ODD_BLOCK, ODD_WARPS, TILE_WARPS, is_odd
from torch_fp8.kernels.rounding import abs_bits, cast_saturating, scale_from_amax
from torch_fp8.kernels.sums import TileSums
from torch_fp8.kernels.tiles import load_tile, per_row, positions, store_sums

HISTORY_CHUNK = 1024  # of a history, at a time: Transformer Engine's length, and our default


@triton.jit
def _past_amax(history_ptr, length, MOST_RECENT: tl.constexpr, CHUNK: tl.constexpr):
    """Bits of what the history suggests: its maximum or its newest entry; 0 if it is empty."""
    if MOST_RECENT:
        bits = abs_bits(tl.load(history_ptr))
    else:
        largest = tl.zeros((CHUNK,), dtype=tl.int32)
        for start in range(0, length, CHUNK):
            i = start + tl.arange(0, CHUNK)
            amax = tl.load(history_ptr + i, mask=i < length, other=0.0)
            largest = tl.maximum(largest, abs_bits(amax))
        bits = tl.max(largest, axis=0)
    return bits


@triton.jit
def _push_amax(history_ptr, length, bits, CHUNK: tl.constexpr):
    """Shift the history by one and put the amax in front; its newest entry again if not finite."""
    INF_BITS: tl.constexpr = 0x7F800000
    newest = tl.load(history_ptr)
    newest = tl.where(bits < INF_BITS, bits.to(tl.float32, bitcast=True), newest)
    chunks = tl.cdiv(length, CHUNK)
    for chunk in range(0, chunks):
        i = (chunks - 1 - chunk) * CHUNK + tl.arange(0, CHUNK)
        older = tl.load(history_ptr + i - 1, mask=(i > 0) & (i < length), other=0.0)
        tl.debug_barrier()  # all of the chunk is read before any of it is written
        tl.store(history_ptr + i, tl.where(i == 0, newest, older), mask=i < length)


@triton.jit
def _cast_tile(
    x,
    scale,
    row_ptr,
    col_ptr,
    r,
    c,
    rows,
    cols,
    mask,
    E5M2: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
):
    q = cast_saturating(x, per_row(scale, r, rows), E5M2)
    if ROW:
        tl.store(row_ptr + r[:, None] * cols + c[None, :], q, mask=mask)
    if COL:
        tl.store(col_ptr + c[None, :] * rows + r[:, None], q, mask=mask)


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
    SUM_AXIS: tl.constexpr,  # along which the tile's sums are stored, or -1
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One tile of x in the layouts asked for; the last program records the amax."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    tile, tiles_c = tl.program_id(0), tl.cdiv(cols, BLOCK_SIZE)
    r = positions(tile // tiles_c, BLOCK_SIZE)
    c = positions(tile % tiles_c, BLOCK_SIZE)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    store_sums(x, sum_ptr, tile // tiles_c, tile % tiles_c, r, c, rows, cols, SUM_AXIS)
    past = _past_amax(history_ptr, length, MOST_RECENT, CHUNK)
    scale = scale_from_amax(past, FMAX, False) * headroom
    largest = tl.max(tl.max(abs_bits(x), axis=1), axis=0)
    if (past != 0) | (largest == 0):
        _cast_tile(x, scale, row_ptr, col_ptr, r, c, rows, cols, mask, E5M2, ROW, COL)

    tl.atomic_max(progress_ptr, largest, sem="relaxed")
    tl.debug_barrier()  # all threads have read the history and written their bytes
    done = tl.atomic_add(progress_ptr + 1, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        amax = tl.atomic_xchg(progress_ptr, 0, sem="relaxed")
        tl.store(progress_ptr + 1, 0)
        if past == 0:
            scale = scale_from_amax(amax, FMAX, False) * headroom
            tiles = tl.num_programs(0)
            if amax == 0:
                tiles = 0
            for other in range(0, tiles):
                other_r = positions(other // tiles_c, BLOCK_SIZE)
                other_c = positions(other % tiles_c, BLOCK_SIZE)
                inside = (other_r[:, None] < rows) & (other_c[None, :] < cols)
                y = load_tile(x_ptr, stride_r, stride_c, other_r, other_c, inside)
                _cast_tile(
                    y, scale, row_ptr, col_ptr, other_r, other_c, rows, cols, inside, E5M2, ROW, COL
                )
        tl.store(scale_ptr, scale)
        if LAST:
            tl.store(last_ptr, scale)
        _push_amax(history_ptr, length, amax, CHUNK)


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
    CHUNK: tl.constexpr,
):
    """The scale, where the amax is known already, which is recorded. One program."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    amax = abs_bits(tl.load(amax_ptr))
    past = _past_amax(history_ptr, length, MOST_RECENT, CHUNK)
    scale = scale_from_amax(tl.where(past != 0, past, amax), FMAX, False) * headroom
    tl.debug_barrier()
    tl.store(scale_ptr, scale)
    if LAST:
        tl.store(last_ptr, scale)
    _push_amax(history_ptr, length, amax, CHUNK)


def quantize_2d_delayed(
    x: Tensor,
    history: Tensor,
    progress: Tensor,
    last: Tensor | None,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
    row: bool,
    col: bool,
    sums: TileSums | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Cast x with the scale that its history suggests, and record its amax, in one launch.

    Args:
        x: (R, C) float32, bfloat16 or float16, any strides, not empty.
        history: (H,) float32, contiguous, the most recent amax first; written.
        progress: (2,) int32, zeros; written, zeros again afterwards.
        last: () float32 that receives the scale, or None.
        dtype: float8_e4m3fn or float8_e5m2.
        algorithm: ``max`` or ``most_recent``.
        margin: headroom in powers of two.
        row, col: the layouts to make.
        sums: filled, if given.
    Returns:
        qdata (R, C) or None, scale () float32, qdata of x^T (C, R) or None.
    """
    if x.stride(1) != 1 and x.stride(0) == 1:  # loads run along the contiguous dimension
        if sums is not None:
            sums.turn()
        by_col, scale, by_row = quantize_2d_delayed(
            x.t(), history, progress, last, dtype, algorithm, margin, col, row, sums
        )
        if sums is not None:
            sums.turn()
        return by_row, scale, by_col
    rows, cols = x.shape
    # In whole tiles E5M2 with the newest amax spilled for sm_100, which had no register left.
    spills = format_of(dtype).has_inf and algorithm == "most_recent" and row and col
    small = is_odd(x) or spills
    block, warps = (ODD_BLOCK, ODD_WARPS) if small else (BLOCK, TILE_WARPS)
    by_row = x.new_empty((rows, cols), dtype=dtype) if row else None
    by_col = x.new_empty((cols, rows), dtype=dtype) if col else None
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
            x.stride(0),
            x.stride(1),
            rows,
            cols,
            history.shape[0],
            2.0**margin,
            E5M2=format_of(dtype).has_inf,
            MOST_RECENT=algorithm == "most_recent",
            LAST=last is not None,
            ROW=row,
            COL=col,
            SUM_AXIS=-1 if sums is None else sums.axis,
            CHUNK=HISTORY_CHUNK,
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
) -> Tensor:
    """The scale that the history suggests, () float32; `amax` () is recorded. One launch.

    Args:
        history, last, dtype, algorithm, margin: as `quantize_2d_delayed`.
        amax: () float32 of the tensor at hand, used while the history is empty.
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
            CHUNK=HISTORY_CHUNK,
            num_warps=4,
        )
    return scale
