"""The forward kernels of `torch_fp8.kernels.swiglu`.

Legend: R rows, C columns; ``h = gate * sigmoid(gate) * up * smooth``.
Kernels compute in float32 without fused multiply-adds, so all of them get the same h.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.fast_math import fast_sigmoid
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import (
    load_tile,
    push_amax,
    push_column_amaxes,
    save_tile,
    store_cast,
    tile_at,
)


@triton.jit
def times_smooth(x, smooth_ptr, stride, c, cols, SMOOTH: tl.constexpr):
    """Multiply x by the smoothing factors of its columns, if there are any."""
    if SMOOTH:
        x *= tl.load(smooth_ptr + c * stride, mask=c < cols, other=0.0)[None, :]
    return x


@quick
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
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
    AMAX: tl.constexpr,  # amax to raise: of the "tensor", or of each of the "columns"; "": none
    SCALE: tl.constexpr,  # see `store_cast`
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
    h = gate * fast_sigmoid(gate) * up
    h = times_smooth(h, smooth_ptr, smooth_stride, c, cols, SMOOTH).to(OUT)
    if SAVE:
        save_tile(gate, gate_q_ptr, gate_s_ptr, tile, rows, cols)
        save_tile(up, up_q_ptr, up_s_ptr, tile, rows, cols)
    h = h.to(tl.float32)  # only here: in OUT it needs fewer registers during the saves
    if AMAX == "tensor":
        push_amax(amax_ptr, h)
    if AMAX == "columns":
        push_column_amaxes(amax_ptr, h, c, cols)
    if ROW or COL:
        store_cast(h, scale_ptr, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL)
