"""The kernels behind `torch_fp8.kernels.swiglu`, which launches them.

Legend: R rows, C columns; ``sig = sigmoid(gate)``, ``h = gate * sig * up * smooth``,
``dgate = grad * smooth * up * (sig + gate * sig * (1 - sig))``,
``dup = grad * smooth * gate * sig``.
Float32 inside; no multiplication is fused with an addition, so that every kernel finds the same h.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.cast_tiles import (
    load_saved,
    push_amax,
    rounded,
    store_cast,
    store_groups,
)
from torch_fp8.kernels.tiles import load_tile, positions


@triton.jit
def _times_smooth(x, smooth_ptr, stride, c, cols, SMOOTH: tl.constexpr):
    if SMOOTH:
        x *= tl.load(smooth_ptr + c * stride, mask=c < cols, other=0.0)[None, :]
    return x


@triton.jit
def _product(gate, up, smooth_ptr, stride, c, cols, SMOOTH: tl.constexpr):
    h = gate * tl.sigmoid(gate) * up
    return _times_smooth(h, smooth_ptr, stride, c, cols, SMOOTH)


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
    """One tile of h."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    r = positions(tl.program_id(0) // tiles_c, BLOCK_R)
    c = positions(tl.program_id(0) % tiles_c, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    gate = load_tile(gate_ptr, gate_r, gate_c, r, c, mask)
    up = load_tile(up_ptr, up_r, up_c, r, c, mask)
    h = _product(gate, up, smooth_ptr, smooth_stride, c, cols, SMOOTH)
    tl.store(h_ptr + r[:, None] * cols + c[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


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
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of h, cast, see `store_cast`; of gate and up, saved; and its part of the amax."""
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


@triton.jit
def _load(
    x_ptr,
    scale_ptr,
    stride_r,
    stride_c,
    scale_r,
    scale_c,
    r,
    c,
    g,
    rows,
    cols,
    mask,
    SAVED: tl.constexpr,
):
    if SAVED:
        return load_saved(
            x_ptr, scale_ptr, stride_r, stride_c, scale_r, scale_c, r, c, g, rows, cols, mask
        )
    return load_tile(x_ptr, stride_r, stride_c, r, c, mask)


@triton.jit
def _gradients(grad, gate, up):
    """(dgate, dup)."""
    sig = tl.sigmoid(gate)
    silu = gate * sig
    return grad * up * (sig + silu * (1.0 - sig)), grad * silu


@triton.jit
def _row_length(cols, JOINED: tl.constexpr):
    """Of the matrix that a gradient of `cols` columns is written to."""
    return cols * 2 if JOINED else cols


@triton.jit
def swiglu_backward_kernel(
    grad_ptr,
    gate_ptr,
    gate_s_ptr,
    up_ptr,
    up_s_ptr,
    smooth_ptr,
    dgate_ptr,
    dup_ptr,
    amax_ptr,
    grad_r,
    grad_c,
    gate_r,
    gate_c,
    gate_s_r,
    gate_s_c,
    up_r,
    up_c,
    up_s_r,
    up_s_c,
    smooth_stride,
    rows,
    cols,
    OUT: tl.constexpr,
    SMOOTH: tl.constexpr,
    GATE_SAVED: tl.constexpr,
    UP_SAVED: tl.constexpr,
    JOINED: tl.constexpr,  # both gradients are halves of the rows of one matrix
    STORE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of dgate and dup, stored, and its part of their amaxes, or of the one of both."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    tile_r, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    r, c = positions(tile_r, BLOCK_R), positions(tile_c, BLOCK_C)
    g = positions(tile_c, BLOCK_C // 128)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    gate = _load(
        gate_ptr,
        gate_s_ptr,
        gate_r,
        gate_c,
        gate_s_r,
        gate_s_c,
        r,
        c,
        g,
        rows,
        cols,
        mask,
        GATE_SAVED,
    )
    up = _load(up_ptr, up_s_ptr, up_r, up_c, up_s_r, up_s_c, r, c, g, rows, cols, mask, UP_SAVED)
    grad = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
    grad = _times_smooth(grad, smooth_ptr, smooth_stride, c, cols, SMOOTH)
    dgate, dup = _gradients(grad, gate, up)
    if STORE:
        offsets = r[:, None] * _row_length(cols, JOINED) + c[None, :]
        tl.store(dgate_ptr + offsets, dgate.to(OUT), mask=mask)
        tl.store(dup_ptr + offsets, dup.to(OUT), mask=mask)
    if AMAX:
        push_amax(amax_ptr, rounded(dgate, OUT))
        push_amax(amax_ptr + (0 if JOINED else 1), rounded(dup, OUT))


@triton.jit
def swiglu_backward_cast_kernel(
    grad_ptr,
    gate_ptr,
    gate_s_ptr,
    up_ptr,
    up_s_ptr,
    smooth_ptr,
    scale_ptr,
    amax_ptr,
    dgate_q_ptr,
    dgate_s_ptr,
    dgate_qt_ptr,
    dgate_st_ptr,
    dup_q_ptr,
    dup_s_ptr,
    dup_qt_ptr,
    dup_st_ptr,
    grad_r,
    grad_c,
    gate_r,
    gate_c,
    gate_s_r,
    gate_s_c,
    up_r,
    up_c,
    up_s_r,
    up_s_c,
    smooth_stride,
    scale_stride,
    rows,
    cols,
    OUT: tl.constexpr,
    SMOOTH: tl.constexpr,
    GATE_SAVED: tl.constexpr,
    UP_SAVED: tl.constexpr,
    JOINED: tl.constexpr,  # as above; with a scale per group it is to divide a half
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
    """One tile of dgate or of dup, cast, see `store_cast`.

    Registers do not hold both. Neighbouring programs make the two of one tile: at the same time, so
    that what both are made of is read from memory once and comes out of the cache the second time.
    """
    tiles_c = tl.cdiv(cols, BLOCK_C)
    gradient, tile = tl.program_id(0) % 2, tl.program_id(0) // 2
    tile_r, tile_c = tile // tiles_c, tile % tiles_c
    r, c = positions(tile_r, BLOCK_R), positions(tile_c, BLOCK_C)
    g = positions(tile_c, BLOCK_C // 128)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    gate = _load(
        gate_ptr,
        gate_s_ptr,
        gate_r,
        gate_c,
        gate_s_r,
        gate_s_c,
        r,
        c,
        g,
        rows,
        cols,
        mask,
        GATE_SAVED,
    )
    d = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
    d = _times_smooth(d, smooth_ptr, smooth_stride, c, cols, SMOOTH)
    sig = tl.sigmoid(gate)
    silu = gate * sig
    if gradient == 0:
        d *= _load(
            up_ptr, up_s_ptr, up_r, up_c, up_s_r, up_s_c, r, c, g, rows, cols, mask, UP_SAVED
        )
        d *= sig + silu * (1.0 - sig)
    else:
        d *= silu
        dgate_q_ptr, dgate_s_ptr = dup_q_ptr, dup_s_ptr
        dgate_qt_ptr, dgate_st_ptr = dup_qt_ptr, dup_st_ptr
    d = rounded(d, OUT)
    if AMAX:
        push_amax(amax_ptr + (0 if JOINED else gradient), d)
    store_cast(
        d,
        scale_ptr + gradient * scale_stride,
        dgate_q_ptr,
        dgate_s_ptr,
        dgate_qt_ptr,
        dgate_st_ptr,
        tile_r,
        tile_c,
        r,
        c,
        rows,
        _row_length(cols, JOINED),
        mask,
        SCALE,
        GROUP,
        E5M2,
        POWER_OF_TWO,
        ROW,
        COL,
    )
