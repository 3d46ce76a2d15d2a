"""These kernels of the forward are launched by `torch_fp8.kernels.swiglu`.

Legend: R rows, C columns; ``h = gate * sigmoid(gate) * up * smooth``.
Float32 inside; no multiplication is fused with an addition, so that every kernel finds the same h.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.delayed_scale import count_in, delayed_scale, past_amax
from torch_fp8.kernels.fp8_cast import largest_bits
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import (
    load_tile,
    push_amax,
    push_column_amaxes,
    rounded,
    save_tile,
    store_cast,
    store_scaled,
    tile_at,
)


@triton.jit
def times_smooth(x, smooth_ptr, stride, c, cols, SMOOTH: tl.constexpr):
    """Multiply x by the smoothing factors of its columns, if there are any."""
    if SMOOTH:
        x *= tl.load(smooth_ptr + c * stride, mask=c < cols, other=0.0)[None, :]
    return x


@triton.jit
def _product(gate, up, smooth_ptr, stride, c, cols, SMOOTH: tl.constexpr):
    h = gate * tl.sigmoid(gate) * up
    return times_smooth(h, smooth_ptr, stride, c, cols, SMOOTH)


@quick
@triton.jit
def swiglu_cast_kernel(
    gate_ptr,
    up_ptr,
    smooth_ptr,
    amax_ptr,
    gate_q_ptr,
    gate_s_ptr,
    up_q_ptr,
    up_s_ptr,
    scale_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    history_ptr,
    progress_ptr,
    length,
    headroom,
    gate_r,
    gate_c,
    up_r,
    up_c,
    smooth_stride,
    rows,
    cols,
    OUT: tl.constexpr,
    SMOOTH: tl.constexpr,
    SAVE: tl.constexpr,
    AMAX: tl.constexpr,  # of all ("tensor") or of each of "columns"; "": not taken
    SCALE: tl.constexpr,  # see `store_cast`; or the "history" or its "recent" entry
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute and store one tile of h (see `store_cast`), save gate and up, and raise amaxes."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    _, _, r, c, mask = tile
    made = (q_ptr, s_ptr, qt_ptr, st_ptr)
    gate = load_tile(gate_ptr, gate_r, gate_c, r, c, mask)
    up = load_tile(up_ptr, up_r, up_c, r, c, mask)
    h = _product(gate, up, smooth_ptr, smooth_stride, c, cols, SMOOTH).to(OUT)
    if SAVE:
        save_tile(gate, gate_q_ptr, gate_s_ptr, tile, rows, cols)
        save_tile(up, up_q_ptr, up_s_ptr, tile, rows, cols)
    h = h.to(tl.float32)
    if SCALE == "history" or SCALE == "recent":
        past = past_amax(history_ptr, length, SCALE == "recent")
        scale = delayed_scale(past, headroom, E5M2)
        largest = largest_bits(h)
        if (past != 0) | (largest == 0):
            store_scaled(h, scale, made, tile, rows, cols, E5M2, ROW, COL)
        FEW_ROWS: tl.constexpr = 16  # rows that the last program casts at a time
        is_last, amax = count_in(progress_ptr, largest, tl.num_programs(0))
        if is_last:
            tiles = 0
            if (past == 0) & (amax != 0):
                scale = delayed_scale(amax, headroom, E5M2)
                tiles = tl.cdiv(rows, FEW_ROWS) * tl.cdiv(cols, BLOCK_C)
            for index in range(0, tiles):
                other = tile_at(index, rows, cols, FEW_ROWS, BLOCK_C)
                _, _, row, col, inside = other
                g = load_tile(gate_ptr, gate_r, gate_c, row, col, inside)
                u = load_tile(up_ptr, up_r, up_c, row, col, inside)
                y = _product(g, u, smooth_ptr, smooth_stride, col, cols, SMOOTH)
                y = rounded(y, OUT)
                store_scaled(y, scale, made, other, rows, cols, E5M2, ROW, COL)
            tl.store(s_ptr, scale)
            tl.store(amax_ptr, amax)
    else:
        if AMAX == "tensor":
            push_amax(amax_ptr, h)
        if AMAX == "columns":
            push_column_amaxes(amax_ptr, h, c, cols)
        if ROW or COL:
            store_cast(
                h, scale_ptr, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL
            )
