"""The backward kernels of `torch_fp8.kernels.swiglu_backward`.

Legend: R rows, C columns; ``sig = sigmoid(gate)``,
``dgate = grad * up * (sig + gate * sig * (1 - sig))``, ``dup = grad * gate * sig``.
Kernels compute in float32 without fused multiply-adds, so all of them get the same gradients.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.fast_math import fast_sigmoid
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import (
    load_saved,
    load_tile,
    push_amax,
    rounded,
    store_cast,
    tile_at,
)


@triton.jit
def _gradients(grad, gate, up):
    """Return (dgate, dup)."""
    sig = fast_sigmoid(gate)
    silu = gate * sig
    return grad * up * (sig + silu * (1.0 - sig)), grad * silu


@triton.jit
def _row_length(cols, JOINED: tl.constexpr):
    """Return the row length of the output matrix for gradients of `cols` columns."""
    return cols * 2 if JOINED else cols


@quick
@triton.jit
def swiglu_backward_kernel(
    grad_ptr,
    gate_ptr,
    gate_s_ptr,
    up_ptr,
    up_s_ptr,
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
    rows,
    cols,
    OUT: tl.constexpr,
    GATE_SAVED: tl.constexpr,
    UP_SAVED: tl.constexpr,
    JOINED: tl.constexpr,  # whether both gradients are halves of one matrix's rows
    STORE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute one tile of dgate and dup; store it if STORE, raise the amaxes if AMAX."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    _, _, r, c, mask = tile
    gate = (gate_ptr, gate_s_ptr, gate_r, gate_c, gate_s_r, gate_s_c)
    gate = load_saved(gate, tile, rows, cols, GATE_SAVED)
    up = (up_ptr, up_s_ptr, up_r, up_c, up_s_r, up_s_c)
    up = load_saved(up, tile, rows, cols, UP_SAVED)
    grad = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
    dgate, dup = _gradients(grad, gate, up)
    if STORE:
        offsets = r[:, None] * _row_length(cols, JOINED) + c[None, :]
        tl.store(dgate_ptr + offsets, dgate.to(OUT), mask=mask)
        tl.store(dup_ptr + offsets, dup.to(OUT), mask=mask)
    if AMAX:
        push_amax(amax_ptr, rounded(dgate, OUT))
        push_amax(amax_ptr + (0 if JOINED else 1), rounded(dup, OUT))


@quick
@triton.jit(
    do_not_specialize_on_alignment=["scale_ptr", "dup_scale_ptr", "amax_ptr", "dup_amax_ptr"]
)
def swiglu_backward_cast_kernel(
    grad_ptr,
    gate_ptr,
    gate_s_ptr,
    up_ptr,
    up_s_ptr,
    scale_ptr,
    dup_scale_ptr,
    amax_ptr,
    dup_amax_ptr,
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
    rows,
    cols,
    OUT: tl.constexpr,
    GATE_SAVED: tl.constexpr,
    UP_SAVED: tl.constexpr,
    JOINED: tl.constexpr,  # as above; groups with scales must not span both halves
    AMAX: tl.constexpr,
    SCALE: tl.constexpr,  # see `store_cast`
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute and cast one tile of dgate and of dup; see `store_cast`."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    _, _, r, c, mask = tile
    gate = (gate_ptr, gate_s_ptr, gate_r, gate_c, gate_s_r, gate_s_c)
    gate = load_saved(gate, tile, rows, cols, GATE_SAVED)
    up = (up_ptr, up_s_ptr, up_r, up_c, up_s_r, up_s_c)
    up = load_saved(up, tile, rows, cols, UP_SAVED)
    grad = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
    dgate, dup = _gradients(grad, gate, up)
    dgate, dup = rounded(dgate, OUT), rounded(dup, OUT)
    if AMAX:
        push_amax(amax_ptr, dgate)
        push_amax(dup_amax_ptr, dup)
    row_length = _row_length(cols, JOINED)
    store_cast(
        dgate,
        scale_ptr,
        (dgate_q_ptr, dgate_s_ptr, dgate_qt_ptr, dgate_st_ptr),
        tile,
        rows,
        row_length,
        SCALE,
        GROUP,
        E5M2,
        POWER_OF_TWO,
        ROW,
        COL,
        width=cols,
    )
    store_cast(
        dup,
        dup_scale_ptr,
        (dup_q_ptr, dup_s_ptr, dup_qt_ptr, dup_st_ptr),
        tile,
        rows,
        row_length,
        SCALE,
        GROUP,
        E5M2,
        POWER_OF_TWO,
        ROW,
        COL,
        width=cols,
    )
