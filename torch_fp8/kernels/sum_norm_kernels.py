"""The kernel of `torch_fp8.kernels.rms_norm` that adds a residual before the norm."""

import triton
import triton.language as tl

from torch_fp8.kernels.fp8_cast import abs_bits
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.rms_norm_kernels import load_columns
from torch_fp8.kernels.tiles import (
    load_tile,
    padded,
    positions,
    push_amax,
    rounded,
    save_tile,
    store_cast,
)


@quick
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def sum_norm_cast_kernel(
    x_ptr,
    addend_ptr,
    sum_ptr,
    weight_ptr,
    rstd_ptr,  # with SAVE, followed by the scales of what is saved
    amax_ptr,
    saved_ptr,
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
    SCALE: tl.constexpr,
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
    """Store x + addend, rounded, and run `norm_cast_once_kernel` on it.

    x, addend and the sum have the same strides. The addends leave the L2 cache first, because the
    program reads the sum of its rows again.
    """
    band, made = tl.program_id(0), (q_ptr, s_ptr, qt_ptr, st_ptr)
    r = positions(band, BLOCK_R)
    columns = tl.arange(0, BLOCK_C).to(tl.int64)
    squares = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(0, cols, BLOCK_C):
        c = start + columns
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        places = r[:, None] * stride_r + c[None, :] * stride_c
        x = tl.load(x_ptr + places, mask=mask, other=0.0, eviction_policy="evict_first")
        addend = tl.load(addend_ptr + places, mask=mask, other=0.0, eviction_policy="evict_first")
        x = (x.to(tl.float32) + addend.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + places, x, mask=mask)
        squares += x.to(tl.float32) * x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) * inverse + eps)
    tl.store(rstd_ptr + r, rstd, mask=r < rows)
    tl.debug_barrier()  # other threads may have stored what a thread loads
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for start in range(0, cols, BLOCK_C):
        c = start + columns
        mask = (r[:, None] < rows) & (c[None, :] < cols)
        tile = (band, start // BLOCK_C, r, c, mask)
        x = load_tile(sum_ptr, stride_r, stride_c, r, c, mask)
        if SAVE:
            save_tile(x, saved_ptr, rstd_ptr + padded(rows, 16), tile, rows, cols)
        weight = load_columns(weight_ptr, weight_stride, offset, c, cols)
        y = tl.where(mask, rounded((x * rstd[:, None]) * weight, OUT), 0.0)
        if AMAX:
            largest = tl.maximum(largest, abs_bits(y))
        store_cast(y, scale_ptr, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL)
    if AMAX:
        push_amax(amax_ptr, largest.to(tl.float32, bitcast=True))
