"""These kernels of RMSNorm's backward are launched by `torch_fp8.kernels.rms_norm`.

Legend: R rows, C columns; ``xhat = x * rstd``, ``w = weight + offset``,
``dx = rstd * (grad w - xhat * mean(grad w xhat))``, ``dw = sum over rows of grad xhat``.
A program owns a slab of rows and adds up its part of dw; the slabs are the launch's choice by the
shape alone, and their parts are added in order.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.epilogue import load_saved
from torch_fp8.kernels.quantize_kernels import load_tile
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.rms_norm_kernels import load_columns, load_rows


@quick
@triton.jit
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
    SAVED: tl.constexpr,  # x is E4M3, with scales
    WEIGHT_GRAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute dx of a slab of rows, BLOCK_R rows at a time, and partial[slab], their part of dw."""
    slab = tl.program_id(0)
    first = slab.to(tl.int64) * rows_per_slab
    last = tl.minimum(first + rows_per_slab, rows)
    source = (x_ptr, scale_ptr, stride_r, stride_c, scale_r, scale_c)
    c = tl.arange(0, BLOCK_C).to(tl.int64)
    g = tl.arange(0, BLOCK_C // 128).to(tl.int64)
    weight = load_columns(weight_ptr, weight_stride, offset, c, cols)
    dw = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(first, last, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (r[:, None] < last) & (c[None, :] < cols)
        x = load_saved(source, r, c, g, rows, cols, mask, SAVED)
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


@quick
@triton.jit
def wide_norm_backward_kernel(
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
    SAVED: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Do as `norm_backward_kernel` does, for rows that do not fit in registers.

    They are read twice, the second time out of the cache, and dw is added up in memory.
    """
    slab = tl.program_id(0)
    first = slab.to(tl.int64) * rows_per_slab
    last = tl.minimum(first + rows_per_slab, rows)
    source = (x_ptr, scale_ptr, stride_r, stride_c, scale_r, scale_c)
    columns = tl.arange(0, BLOCK_C).to(tl.int64)
    groups = tl.arange(0, BLOCK_C // 128).to(tl.int64)
    for start in range(first, last, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        rstd = load_rows(rstd_ptr, rstd_stride, r, rows)
        products = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        for chunk in range(0, cols, BLOCK_C):
            c, g = chunk + columns, chunk // 128 + groups
            mask = (r[:, None] < last) & (c[None, :] < cols)
            x = load_saved(source, r, c, g, rows, cols, mask, SAVED)
            grad = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
            grad *= load_columns(weight_ptr, weight_stride, offset, c, cols)
            products += tl.where(mask, grad * (x * rstd), 0.0)
        mean = tl.sum(products, axis=1) * inverse
        for chunk in range(0, cols, BLOCK_C):
            c, g = chunk + columns, chunk // 128 + groups
            mask = (r[:, None] < last) & (c[None, :] < cols)
            x = load_saved(source, r, c, g, rows, cols, mask, SAVED)
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
        tl.debug_barrier()  # what one thread has stored of dw another may load
