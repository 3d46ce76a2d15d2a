"""These kernels are launched by `torch_fp8.kernels.rms_norm`.

Legend: R rows, C columns of x; ``xhat = x * rstd``, ``w = weight + offset``, ``y = xhat * w``.
Float32 inside; no multiplication is fused with an addition, so that every kernel finds the same y.
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
from torch_fp8.kernels.fp8_cast import abs_bits
from torch_fp8.kernels.quantize_kernels import load_tile, positions
from torch_fp8.kernels.quick_launch import quick


@triton.jit
def load_columns(weight_ptr, stride, offset, c, cols):
    """Load weight + offset as a row of float32."""
    weight = tl.load(weight_ptr + c * stride, mask=c < cols, other=0.0).to(tl.float32)
    return (weight + offset)[None, :]


@triton.jit
def load_rows(rstd_ptr, stride, r, rows):
    """Load rstd of rows as a column of float32."""
    return tl.load(rstd_ptr + r * stride, mask=r < rows, other=0.0)[:, None]


@quick
@triton.jit
def statistics_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    amax_ptr,
    saved_ptr,
    saved_scale_ptr,
    stride_r,
    stride_c,
    weight_stride,
    rows,
    cols,
    inverse,
    eps,
    offset,
    OUT: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IN_REGISTERS: tl.constexpr,  # BLOCK_C >= cols: x is read once
):
    """Compute rstd of BLOCK_R whole rows, the amax of y, and x in E4M3; `inverse` is 1 / C."""
    r = positions(tl.program_id(0), BLOCK_R)
    c = tl.arange(0, BLOCK_C).to(tl.int64)
    if IN_REGISTERS:
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) * inverse + eps)
        y = (x * rstd[:, None]) * load_columns(weight_ptr, weight_stride, offset, c, cols)
        push_amax(amax_ptr, tl.where(mask, rounded(y, OUT), 0.0))
        if SAVE:
            store_groups(x, saved_ptr, saved_scale_ptr, r, c, 0, rows, cols, mask, 128, False, True)
    else:
        squares = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        for start in range(0, cols, BLOCK_C):
            mask = (r[:, None] < rows) & (start + c[None, :] < cols)
            x = load_tile(x_ptr, stride_r, stride_c, r, start + c, mask)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1) * inverse + eps)
        largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
        for start in range(0, cols, BLOCK_C):  # out of the cache: BLOCK_R rows are small
            columns = start + c
            mask = (r[:, None] < rows) & (columns[None, :] < cols)
            x = load_tile(x_ptr, stride_r, stride_c, r, columns, mask)
            weight = load_columns(weight_ptr, weight_stride, offset, columns, cols)
            y = tl.where(mask, rounded((x * rstd[:, None]) * weight, OUT), 0.0)
            largest = tl.maximum(largest, abs_bits(y))
            if SAVE:
                first = start // 128
                store_groups(
                    x,
                    saved_ptr,
                    saved_scale_ptr,
                    r,
                    columns,
                    first,
                    rows,
                    cols,
                    mask,
                    128,
                    False,
                    True,
                )
        push_amax(amax_ptr, largest.to(tl.float32, bitcast=True))
    tl.store(rstd_ptr + r, rstd, mask=r < rows)


@quick
@triton.jit
def norm_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    y_ptr,
    stride_r,
    stride_c,
    weight_stride,
    rstd_stride,
    rows,
    cols,
    offset,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute one tile of y."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    r = positions(tl.program_id(0) // tiles_c, BLOCK_R)
    c = positions(tl.program_id(0) % tiles_c, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    y = x * load_rows(rstd_ptr, rstd_stride, r, rows)
    y *= load_columns(weight_ptr, weight_stride, offset, c, cols)
    tl.store(y_ptr + r[:, None] * cols + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@quick
@triton.jit
def norm_cast_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    scale_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    stride_r,
    stride_c,
    weight_stride,
    rstd_stride,
    rows,
    cols,
    offset,
    OUT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Compute and cast one tile of y; see `store_cast`."""
    tiles_c = tl.cdiv(cols, BLOCK_SIZE)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    r, c = positions(tile_r, BLOCK_SIZE), positions(tile_c, BLOCK_SIZE)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    y = x * load_rows(rstd_ptr, rstd_stride, r, rows)
    y = rounded(y * load_columns(weight_ptr, weight_stride, offset, c, cols), OUT)
    store_cast(
        tl.where(mask, y, 0.0),
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


@triton.jit
def _normed(x, rstd, weight_ptr, weight_stride, offset, c, cols, mask, OUT: tl.constexpr):
    """Compute a tile of y, rounded, and 0 outside."""
    weight = load_columns(weight_ptr, weight_stride, offset, c, cols)
    return tl.where(mask, rounded((x * rstd[:, None]) * weight, OUT), 0.0)


@quick
@triton.jit
def norm_cast_once_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    amax_ptr,
    saved_ptr,
    saved_scale_ptr,
    scale_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    history_ptr,
    progress_ptr,
    length,
    headroom,
    stride_r,
    stride_c,
    weight_stride,
    rows,
    cols,
    inverse,
    eps,
    offset,
    OUT: tl.constexpr,
    SCALE: tl.constexpr,  # see `store_cast`; or the "history" or its "recent" entry
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SAVE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Run `statistics_kernel` and then `norm_cast_kernel` on a band of BLOCK_R whole rows."""
    DELAYED: tl.constexpr = SCALE == "history" or SCALE == "recent"
    band = tl.program_id(0)
    r = positions(band, BLOCK_R)
    columns = tl.arange(0, BLOCK_C).to(tl.int64)
    squares = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(0, cols, BLOCK_C):
        c = start + columns
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=1) * inverse + eps)
    tl.store(rstd_ptr + r, rstd, mask=r < rows)
    if DELAYED:
        past = past_amax(history_ptr, length, SCALE == "recent")
        scale = delayed_scale(past, headroom, E5M2)
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for start in range(0, cols, BLOCK_C):
        c = start + columns
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        if SAVE:
            store_groups(
                x,
                saved_ptr,
                saved_scale_ptr,
                r,
                c,
                start // 128,
                rows,
                cols,
                mask,
                128,
                False,
                True,
            )
        y = _normed(x, rstd, weight_ptr, weight_stride, offset, c, cols, mask, OUT)
        if AMAX:
            largest = tl.maximum(largest, abs_bits(y))
        if DELAYED:  # without a history, what is not zero is written over by the last program
            store_scaled(y, scale, q_ptr, qt_ptr, r, c, rows, cols, mask, E5M2, ROW, COL)
        else:
            store_cast(
                y,
                scale_ptr,
                q_ptr,
                s_ptr,
                qt_ptr,
                st_ptr,
                band,
                start // BLOCK_C,
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
    if DELAYED:
        bits = tl.max(tl.max(largest, axis=1), axis=0)
        FEW_ROWS: tl.constexpr = 16  # rows that the last program casts at a time
        is_last, amax = count_in(progress_ptr, bits, tl.num_programs(0))
        if is_last:
            bands = 0
            if (past == 0) & (amax != 0):
                scale = delayed_scale(amax, headroom, E5M2)
                bands = tl.cdiv(rows, FEW_ROWS)
            for other in range(0, bands):
                row = other * FEW_ROWS + tl.arange(0, FEW_ROWS).to(tl.int64)
                factor = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
                for start in range(0, cols, BLOCK_C):
                    col = start + columns
                    inside = (row[:, None] < rows) & (col[None, :] < cols)
                    values = load_tile(x_ptr, stride_r, stride_c, row, col, inside)
                    normed = _normed(
                        values, factor, weight_ptr, weight_stride, offset, col, cols, inside, OUT
                    )
                    store_scaled(
                        normed, scale, q_ptr, qt_ptr, row, col, rows, cols, inside, E5M2, ROW, COL
                    )
            tl.store(s_ptr, scale)
            tl.store(amax_ptr, amax)
    elif AMAX:
        push_amax(amax_ptr, largest.to(tl.float32, bitcast=True))
