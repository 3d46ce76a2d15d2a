"""The kernels of `torch_fp8.kernels.rms_norm`.

Legend: R rows, C columns of x; ``xhat = x * rstd``, ``w = weight + offset``, ``y = xhat * w``;
``dx = rstd * (grad w - xhat * mean(grad w xhat))``, ``dw = sum over rows of grad xhat``.
Kernels compute in float32 without fused multiply-adds, so all of them get the same y. In backward,
a program sums its part of dw over a slab of rows. Slabs depend on the shape alone, and their parts
are added in a fixed order.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.fp8_cast import abs_bits
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import (
    load_saved,
    load_tile,
    padded,
    positions,
    push_amax,
    rounded,
    save_tile,
    store_cast,
    tile_at,
)


@triton.jit
def load_columns(weight_ptr, stride, offset, c, cols):
    """Load weight + offset of columns c as float32 (1, BLOCK_C)."""
    weight = tl.load(weight_ptr + c * stride, mask=c < cols, other=0.0).to(tl.float32)
    return (weight + offset)[None, :]


@triton.jit
def load_rows(rstd_ptr, stride, r, rows):
    """Load rstd of rows r as float32 (BLOCK_R, 1)."""
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
    """Store rstd of BLOCK_R whole rows, raise the amax of y, save x in E4M3; `inverse` is 1 / C."""
    r = positions(tl.program_id(0), BLOCK_R)
    c = tl.arange(0, BLOCK_C).to(tl.int64)
    if IN_REGISTERS:
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) * inverse + eps)
        y = (x * rstd[:, None]) * load_columns(weight_ptr, weight_stride, offset, c, cols)
        push_amax(amax_ptr, tl.where(mask, rounded(y, OUT), 0.0))
        if SAVE:
            save_tile(x, saved_ptr, saved_scale_ptr, (0, 0, r, c, mask), rows, cols)
    else:
        squares = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        for start in range(0, cols, BLOCK_C):
            mask = (r[:, None] < rows) & (start + c[None, :] < cols)
            x = load_tile(x_ptr, stride_r, stride_c, r, start + c, mask)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1) * inverse + eps)
        largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
        for start in range(0, cols, BLOCK_C):  # from cache: BLOCK_R rows are small
            columns = start + c
            mask = (r[:, None] < rows) & (columns[None, :] < cols)
            x = load_tile(x_ptr, stride_r, stride_c, r, columns, mask)
            weight = load_columns(weight_ptr, weight_stride, offset, columns, cols)
            y = tl.where(mask, rounded((x * rstd[:, None]) * weight, OUT), 0.0)
            largest = tl.maximum(largest, abs_bits(y))
            if SAVE:
                tile = (0, start // BLOCK_C, r, columns, mask)
                save_tile(x, saved_ptr, saved_scale_ptr, tile, rows, cols)
        push_amax(amax_ptr, largest.to(tl.float32, bitcast=True))
    tl.store(rstd_ptr + r, rstd, mask=r < rows)


@quick
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def norm_cast_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    scale_ptr,
    amax_ptr,
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
    AMAX: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute and store one tile of y; see `store_cast`."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    _, _, r, c, mask = tile
    made = (q_ptr, s_ptr, qt_ptr, st_ptr)
    x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
    y = x * load_rows(rstd_ptr, rstd_stride, r, rows)
    y = rounded(y * load_columns(weight_ptr, weight_stride, offset, c, cols), OUT)
    y = tl.where(mask, y, 0.0)
    if AMAX:
        push_amax(amax_ptr, y)
    store_cast(y, scale_ptr, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL)


@quick
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def norm_cast_once_kernel(
    x_ptr,
    addend_ptr,
    sum_ptr,
    weight_ptr,
    rstd_ptr,  # with ADD and SAVE, followed by the scales of what is saved
    amax_ptr,
    saved_ptr,
    saved_scale_ptr,
    scale_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    stride_r,
    stride_c,
    weight_stride,
    rows,
    cols,
    inverse,
    eps,
    offset,
    OUT: tl.constexpr,
    SCALE: tl.constexpr,  # see `store_cast`
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SAVE: tl.constexpr,
    AMAX: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Run `statistics_kernel` and then `norm_cast_kernel` on a band of BLOCK_R whole rows.

    With ADD, they run on x + addend, which is rounded and stored; x, addend and the sum have the
    same strides. The addends leave the L2 cache first, because the program reads the sum again.
    """
    band, made = tl.program_id(0), (q_ptr, s_ptr, qt_ptr, st_ptr)
    r = positions(band, BLOCK_R)
    columns = tl.arange(0, BLOCK_C).to(tl.int64)
    squares = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(0, cols, BLOCK_C):
        c = start + columns
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        if ADD:
            places = r[:, None] * stride_r + c[None, :] * stride_c
            x = tl.load(x_ptr + places, mask=mask, other=0.0, eviction_policy="evict_first")
            added = tl.load(
                addend_ptr + places, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            x = (x.to(tl.float32) + added.to(tl.float32)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + places, x, mask=mask)
            x = x.to(tl.float32)
        else:
            x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=1) * inverse + eps)
    tl.store(rstd_ptr + r, rstd, mask=r < rows)
    if ADD:
        x_ptr, saved_scale_ptr = sum_ptr, rstd_ptr + padded(rows, 16)
        tl.debug_barrier()  # other threads may have stored what a thread loads
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for start in range(0, cols, BLOCK_C):
        c = start + columns
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        tile = (band, start // BLOCK_C, r, c, mask)
        x = load_tile(x_ptr, stride_r, stride_c, r, c, mask)
        if SAVE:
            save_tile(x, saved_ptr, saved_scale_ptr, tile, rows, cols)
        weight = load_columns(weight_ptr, weight_stride, offset, c, cols)
        y = tl.where(mask, rounded((x * rstd[:, None]) * weight, OUT), 0.0)
        if AMAX:
            largest = tl.maximum(largest, abs_bits(y))
        store_cast(y, scale_ptr, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL)
    if AMAX:
        push_amax(amax_ptr, largest.to(tl.float32, bitcast=True))


@quick
@triton.jit(do_not_specialize=["rows_per_slab"])
def norm_backward_kernel(
    grad_ptr,
    x_ptr,
    scale_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    grad_r,
    grad_c,
    stride_r,
    stride_c,
    scale_r,
    scale_c,
    weight_stride,
    rstd_stride,
    rows,
    cols,
    rows_per_slab,
    inverse,
    offset,
    SAVED: tl.constexpr,  # x is E4M3 with scales
    WEIGHT_GRAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,  # BLOCK_C < cols
):
    """Compute dx of a slab, BLOCK_R rows at a time, and partial[slab], the slab's part of dw.

    If rows do not fit in registers (WIDE), they are read twice, the second time from cache, and dw
    accumulates in memory.
    """
    slab = tl.program_id(0)
    first = slab.to(tl.int64) * rows_per_slab
    last = tl.minimum(first + rows_per_slab, rows)
    source = (x_ptr, scale_ptr, stride_r, stride_c, scale_r, scale_c)
    columns = tl.arange(0, BLOCK_C).to(tl.int64)
    if WIDE:
        for start in range(first, last, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            rstd = load_rows(rstd_ptr, rstd_stride, r, rows)
            products = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
            for chunk in range(0, cols, BLOCK_C):
                c = chunk + columns
                mask = (r[:, None] < last) & (c[None, :] < cols)
                x = load_saved(source, (0, chunk // BLOCK_C, r, c, mask), rows, cols, SAVED)
                grad = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
                grad *= load_columns(weight_ptr, weight_stride, offset, c, cols)
                products += tl.where(mask, grad * (x * rstd), 0.0)
            mean = tl.sum(products, axis=1) * inverse
            for chunk in range(0, cols, BLOCK_C):
                c = chunk + columns
                mask = (r[:, None] < last) & (c[None, :] < cols)
                x = load_saved(source, (0, chunk // BLOCK_C, r, c, mask), rows, cols, SAVED)
                xhat = x * rstd
                grad = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
                if WEIGHT_GRAD:
                    target = partial_ptr + slab.to(tl.int64) * cols + c
                    dw = tl.sum(tl.where(mask, grad * xhat, 0.0), axis=0)
                    dw += tl.load(target, mask=(c < cols) & (start > first), other=0.0)
                    tl.store(target, dw, mask=c < cols)
                grad *= load_columns(weight_ptr, weight_stride, offset, c, cols)
                dx = rstd * (grad - xhat * mean[:, None])
                offsets = r[:, None] * cols + c[None, :]
                tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            tl.debug_barrier()  # another thread may load this thread's part of dw
    else:
        c = columns
        weight = load_columns(weight_ptr, weight_stride, offset, c, cols)
        dw = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        for start in range(first, last, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            mask = (r[:, None] < last) & (c[None, :] < cols)
            x = load_saved(source, (0, 0, r, c, mask), rows, cols, SAVED)
            rstd = load_rows(rstd_ptr, rstd_stride, r, rows)
            xhat = x * rstd
            grad = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
            if WEIGHT_GRAD:
                dw += tl.where(mask, grad * xhat, 0.0)
            grad *= weight
            mean = tl.sum(tl.where(mask, grad * xhat, 0.0), axis=1) * inverse
            dx = rstd * (grad - xhat * mean[:, None])
            offsets = r[:, None] * cols + c[None, :]
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WEIGHT_GRAD:
            tl.store(partial_ptr + slab.to(tl.int64) * cols + c, tl.sum(dw, axis=0), mask=c < cols)
