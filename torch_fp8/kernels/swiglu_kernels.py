"""These kernels of the forward are launched by `torch_fp8.kernels.swiglu`.

Legend: R rows, C columns; ``h = gate * sigmoid(gate) * up * smooth``.
Float32 inside; no multiplication is fused with an addition, so that every kernel finds the same h.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.delayed_scale import (
    count_in,
    delayed_scale,
    past_amax,
    store_scaled,
)
from torch_fp8.kernels.epilogue import push_amax, rounded, store_cast, store_groups
from torch_fp8.kernels.fp8_cast import largest_bits
from torch_fp8.kernels.quantize_kernels import load_tile, positions
from torch_fp8.kernels.quick_launch import quick


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
def swiglu_kernel(
    gate_ptr,
    up_ptr,
    smooth_ptr,
    h_ptr,
    gate_r,
    gate_c,
    up_r,
    up_c,
    smooth_stride,
    rows,
    cols,
    SMOOTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute one tile of h."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    r = positions(tl.program_id(0) // tiles_c, BLOCK_R)
    c = positions(tl.program_id(0) % tiles_c, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    gate = load_tile(gate_ptr, gate_r, gate_c, r, c, mask)
    up = load_tile(up_ptr, up_r, up_c, r, c, mask)
    h = _product(gate, up, smooth_ptr, smooth_stride, c, cols, SMOOTH)
    tl.store(h_ptr + r[:, None] * cols + c[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


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
    AMAX: tl.constexpr,
    SCALE: tl.constexpr,  # see `store_cast`; or the "history" or its "recent" entry
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute and cast one tile of h (see `store_cast`), save gate and up, and raise the amax."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    r, c = positions(tile_r, BLOCK_R), positions(tile_c, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    gate = load_tile(gate_ptr, gate_r, gate_c, r, c, mask)
    up = load_tile(up_ptr, up_r, up_c, r, c, mask)
    h = _product(gate, up, smooth_ptr, smooth_stride, c, cols, SMOOTH).to(OUT)
    if SAVE:
        first = tile_c * (BLOCK_C // 128)
        store_groups(gate, gate_q_ptr, gate_s_ptr, r, c, first, rows, cols, mask, 128, False, True)
        store_groups(up, up_q_ptr, up_s_ptr, r, c, first, rows, cols, mask, 128, False, True)
    h = h.to(tl.float32)
    if SCALE == "history" or SCALE == "recent":
        past = past_amax(history_ptr, length, SCALE == "recent")
        scale = delayed_scale(past, headroom, E5M2)
        largest = largest_bits(h)
        if (past != 0) | (largest == 0):
            store_scaled(h, scale, q_ptr, qt_ptr, r, c, rows, cols, mask, E5M2, ROW, COL)
        FEW_ROWS: tl.constexpr = 16  # rows that the last program casts at a time
        is_last, amax = count_in(progress_ptr, largest, tl.num_programs(0))
        if is_last:
            tiles = 0
            if (past == 0) & (amax != 0):
                scale = delayed_scale(amax, headroom, E5M2)
                tiles = tl.cdiv(rows, FEW_ROWS) * tiles_c
            for tile in range(0, tiles):
                row, col = positions(tile // tiles_c, FEW_ROWS), positions(tile % tiles_c, BLOCK_C)
                inside = (row[:, None] < rows) & (col[None, :] < cols)
                g = load_tile(gate_ptr, gate_r, gate_c, row, col, inside)
                u = load_tile(up_ptr, up_r, up_c, row, col, inside)
                y = _product(g, u, smooth_ptr, smooth_stride, col, cols, SMOOTH)
                y = rounded(y, OUT)
                store_scaled(y, scale, q_ptr, qt_ptr, row, col, rows, cols, inside, E5M2, ROW, COL)
            tl.store(s_ptr, scale)
            tl.store(amax_ptr, amax)
    else:
        if AMAX:
            push_amax(amax_ptr, h)
        if ROW or COL:
            store_cast(
                h,
                scale_ptr,
                q_ptr,
                s_ptr,
                qt_ptr,
                st_ptr,
                tile_r,
                tile_c,
                r,
                c,
                rows,
                cols,
                mask,
                SCALE,
                GROUP,
                E5M2,
                POWER_OF_TWO,
                ROW,
                COL,
            )
