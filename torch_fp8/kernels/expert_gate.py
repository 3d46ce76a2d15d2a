"""The gated activation of experts on CUDA: the twin of `torch_fp8.ops.expert_gate`.

These kernels are memory-bound. For each BF16 pair of gate and up, the forward reads 4 bytes twice,
the second time from cache, writes 1 byte, and saves 2 for backward. The backward reads 4 bytes and
writes 3.

Legend: R rows of all experts, I expert width. Launch configurations are fixed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import EXPERT_ROWS, GateBackwardInputs, GateForm
from torch_fp8.kernels.cast_launch import BLOCK, TYPES, Tile, cdiv, pointers, saved_outputs
from torch_fp8.kernels.fast_math import fast_sigmoid
from torch_fp8.kernels.fp8_cast import abs_bits, cast_bounded, scale_from_amax
from torch_fp8.kernels.moe_rows import group_of
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import load_saved, load_tile, positions, rounded, save_tile


@triton.jit
def _row_tile(tile_r, tile_c, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the tile at a row and column of tiles, as `tiles.tile_at` does for an index."""
    r, c = positions(tile_r, BLOCK_R), tl.arange(0, BLOCK_C).to(tl.int64) + tile_c * BLOCK_C
    return tile_r, tile_c, r, c, (r[:, None] < rows) & (c[None, :] < cols)


@triton.jit
def _wide(tile, rows, cols):
    """Return the positions (2 BLOCK_C,) of gate and up in a row that interleaves them, and a mask
    (BLOCK_R, 2 BLOCK_C).
    """
    _, tile_c, r, _, mask = tile
    WIDE: tl.constexpr = 2 * mask.shape[1]
    both = tl.arange(0, WIDE).to(tl.int64) + tile_c * WIDE
    return both, (r[:, None] < rows) & (both[None, :] < 2 * cols)


@triton.jit
def _load_pair(x_ptr, line, tile, rows, cols, INTERLEAVED: tl.constexpr):
    """Load gate and up of a tile as float32 from rows of 2I elements.

    line: positions (BLOCK_R,) of the rows' first elements.
    """
    _, _, _, c, mask = tile
    if INTERLEAVED:
        both, inside = _wide(tile, rows, cols)
        x = tl.load(x_ptr + line[:, None] + both[None, :], mask=inside, other=0.0)
        # (BLOCK_R, 2 BLOCK_C) to two of (BLOCK_R, BLOCK_C): even columns, odd columns.
        gate, up = tl.split(tl.reshape(x, (mask.shape[0], mask.shape[1], 2)))
    else:
        places = x_ptr + line[:, None] + c[None, :]
        gate = tl.load(places, mask=mask, other=0.0)
        up = tl.load(places + cols, mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_pair(out_ptr, gate, up, tile, rows, cols, INTERLEAVED: tl.constexpr):
    """Store the bytes of gate and up of a tile in rows of 2I elements."""
    _, _, r, c, mask = tile
    line = r[:, None] * (2 * cols)
    if INTERLEAVED:
        both, inside = _wide(tile, rows, cols)
        x = tl.reshape(tl.join(gate, up), (mask.shape[0], 2 * mask.shape[1]))
        tl.store(out_ptr + line + both[None, :], x, mask=inside)
    else:
        tl.store(out_ptr + line + c[None, :], gate, mask=mask)
        tl.store(out_ptr + line + cols + c[None, :], up, mask=mask)


@triton.jit
def _within(gate, up, limit, CLAMPED: tl.constexpr):
    """Return gate and its factor, clamped to their limits; NaN stays NaN."""
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up) + 1.0
    return gate, up


@triton.jit
def _saved(x, limit, CLAMPED: tl.constexpr, BOTH: tl.constexpr):
    """Return the value to save for gate, or for up, which has limits on BOTH sides; see the
    operator.
    """
    if CLAMPED:
        beyond = limit * 1.25
        x = tl.where((x > limit) & (x < beyond), beyond, x)
        if BOTH:
            x = tl.where((x < -limit) & (x > -beyond), -beyond, x)
    return x


@triton.jit
def _activation(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    gate, up = _within(gate, up, limit, CLAMPED)
    return gate * fast_sigmoid(gate * alpha if CLAMPED else gate) * up


@triton.jit
def _gradients(grad, gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """Return (dgate, dup) of the activation; see `torch_fp8.ops.expert_gate`."""
    inner_gate, factor = _within(gate, up, limit, CLAMPED)
    sig = fast_sigmoid(inner_gate * alpha if CLAMPED else inner_gate)
    silu = inner_gate * sig
    slope = sig + (silu * alpha if CLAMPED else silu) * (1.0 - sig)
    dgate, dup = grad * factor * slope, grad * silu
    if CLAMPED:
        cut = limit * 1.125
        dgate = tl.where((gate > cut) & (dgate == dgate), 0.0, dgate)
        dup = tl.where((tl.abs(up) > cut) & (dup == dup), 0.0, dup)
    return dgate, dup


@triton.jit
def _row_scale(largest, scale_ptr, r, rows):
    """Compute, store and return the rows' scales from the bits of their amaxes."""
    scale = scale_from_amax(largest, 448.0, True)
    tl.store(scale_ptr + r, scale, mask=r < rows)
    return scale[:, None]


@triton.jit
def _expert_input(
    h, lines, tile, rows, cols, INTERLEAVED: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr
):
    """Return gate and up with their bias, rounded to OUT.

    h: pointers to h and bias; lines: positions of their rows.
    """
    gate, up = _load_pair(h[0], lines[0], tile, rows, cols, INTERLEAVED)
    if BIAS:
        gate_bias, up_bias = _load_pair(h[1], lines[1], tile, rows, cols, INTERLEAVED)
        gate, up = rounded(gate + gate_bias, OUT), rounded(up + up_bias, OUT)
    return gate, up


@quick
@triton.jit(do_not_specialize=["rows", "groups"])
def expert_gate_kernel(
    h_ptr,
    bias_ptr,
    score_ptr,
    offs_ptr,
    q_ptr,
    s_ptr,
    gate_q_ptr,
    gate_s_ptr,
    up_q_ptr,
    up_s_ptr,
    rows,
    cols,
    groups,
    alpha,
    limit,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast the activations of BLOCK_R rows times their scores; save gate and up if SAVE."""
    tile_r = tl.program_id(0)
    r = positions(tile_r, BLOCK_R)
    score = tl.load(score_ptr + r, mask=r < rows, other=0.0)[:, None]
    line = r * (2 * cols)
    bias_line = line
    if BIAS:
        group = tl.minimum(group_of(offs_ptr, r.to(tl.int32), groups), groups - 1)
        bias_line = group.to(tl.int64) * (2 * cols)
    h, lines = (h_ptr, bias_ptr), (line, bias_line)
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for tile_c in range(0, tl.cdiv(cols, BLOCK_C)):
        tile = _row_tile(tile_r, tile_c, rows, cols, BLOCK_R, BLOCK_C)
        gate, up = _expert_input(h, lines, tile, rows, cols, INTERLEAVED, OUT, BIAS)
        a = rounded(_activation(gate, up, alpha, limit, CLAMPED) * score, OUT)
        largest = tl.maximum(largest, abs_bits(a))
        if SAVE:
            gate, up = _saved(gate, limit, CLAMPED, False), _saved(up, limit, CLAMPED, True)
            save_tile(gate, gate_q_ptr, gate_s_ptr, tile, rows, cols)
            save_tile(up, up_q_ptr, up_s_ptr, tile, rows, cols)
    scale = _row_scale(tl.max(largest, axis=1), s_ptr, r, rows)
    for tile_c in range(0, tl.cdiv(cols, BLOCK_C)):
        tile = _row_tile(tile_r, tile_c, rows, cols, BLOCK_R, BLOCK_C)
        gate, up = _expert_input(h, lines, tile, rows, cols, INTERLEAVED, OUT, BIAS)
        a = rounded(_activation(gate, up, alpha, limit, CLAMPED) * score, OUT)
        q = cast_bounded(a, scale, False, True)
        tl.store(q_ptr + r[:, None] * cols + tile[3][None, :], q, mask=tile[4])


@triton.jit
def _backward_tile(operands, form, tile, rows, cols, score, CLAMPED: tl.constexpr):
    """Return a tile of the gradient, the activation, and the gradients of gate and up.

    operands: pointers to the gradient and to codes and scales of gate and up, and the column stride
    of the scales; form: alpha, limit.
    """
    grad_ptr, gate_ptr, gate_s_ptr, up_ptr, up_s_ptr, scale_c = operands
    alpha, limit = form
    _, _, r, c, mask = tile
    gate = load_saved((gate_ptr, gate_s_ptr, cols, 1, 1, scale_c), tile, rows, cols, True)
    up = load_saved((up_ptr, up_s_ptr, cols, 1, 1, scale_c), tile, rows, cols, True)
    grad = load_tile(grad_ptr, cols, 1, r, c, mask)
    act = _activation(gate, up, alpha, limit, CLAMPED)
    dgate, dup = _gradients(grad * score, gate, up, alpha, limit, CLAMPED)
    return grad, act, dgate, dup


@quick
@triton.jit(do_not_specialize=["rows"])
def expert_gate_backward_kernel(
    grad_ptr,
    score_ptr,
    gate_ptr,
    gate_s_ptr,
    up_ptr,
    up_s_ptr,
    q_ptr,
    s_ptr,
    dh_ptr,
    dh_s_ptr,
    dscore_ptr,
    scale_c,
    rows,
    cols,
    alpha,
    limit,
    OUT: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast the activations and the gradients of gate and up of BLOCK_R rows; sum up the scores'.

    scale_c: stride of a saved scale's columns.
    """
    tile_r = tl.program_id(0)
    r = positions(tile_r, BLOCK_R)
    score = tl.load(score_ptr + r, mask=r < rows, other=0.0)[:, None]
    operands = (grad_ptr, gate_ptr, gate_s_ptr, up_ptr, up_s_ptr, scale_c)
    form = (alpha, limit)
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    largest_d = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for tile_c in range(0, tl.cdiv(cols, BLOCK_C)):
        tile = _row_tile(tile_r, tile_c, rows, cols, BLOCK_R, BLOCK_C)
        grad, act, dgate, dup = _backward_tile(operands, form, tile, rows, cols, score, CLAMPED)
        total += grad * act
        largest = tl.maximum(largest, abs_bits(rounded(act * score, OUT)))
        bits = tl.maximum(abs_bits(rounded(dgate, OUT)), abs_bits(rounded(dup, OUT)))
        largest_d = tl.maximum(largest_d, bits)
    tl.store(dscore_ptr + r, tl.sum(total, axis=1), mask=r < rows)
    scale = _row_scale(tl.max(largest, axis=1), s_ptr, r, rows)
    scale_d = _row_scale(tl.max(largest_d, axis=1), dh_s_ptr, r, rows)
    for tile_c in range(0, tl.cdiv(cols, BLOCK_C)):
        tile = _row_tile(tile_r, tile_c, rows, cols, BLOCK_R, BLOCK_C)
        _, act, dgate, dup = _backward_tile(operands, form, tile, rows, cols, score, CLAMPED)
        q = cast_bounded(rounded(act * score, OUT), scale, False, True)
        tl.store(q_ptr + r[:, None] * cols + tile[3][None, :], q, mask=tile[4])
        gate_q = cast_bounded(rounded(dgate, OUT), scale_d, False, True)
        up_q = cast_bounded(rounded(dup, OUT), scale_d, False, True)
        _store_pair(dh_ptr, gate_q, up_q, tile, rows, cols, INTERLEAVED)


ROWS, WARPS = 4, 4
WIDE = 512
"""Columns of a tile: 16 elements of each operand per thread, half as many in float32. Backward has
more operands and takes half of that. If I is not a multiple of 16, elements move one by one, in
tiles of one group (128 columns).
"""
REGISTERS = 128
"""Limit per thread; left alone, the assembler uses 96 for one variant and spills 8 bytes."""


def _options(x: Tensor, cols: int, form: GateForm, operands: int = 1) -> dict[str, object]:
    """Return the constants and options of a launch; `operands`: how many times those of forward."""
    block_c = BLOCK if cols % 16 else WIDE >> (x.element_size() == 4)
    return {
        **{"OUT": TYPES[x.dtype], "CLAMPED": form.clamped, "INTERLEAVED": form.interleaved},
        **Tile(ROWS, max(block_c // operands, BLOCK), WARPS).options,
        **{"enable_fp_fusion": False, "maxnreg": REGISTERS},
    }


def expert_gate_quantize(
    h: Tensor, score: Tensor, offs: Tensor, bias: Tensor | None, form: GateForm, save: bool
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.expert_gate.expert_gate_quantize`."""
    rows, cols = h.shape[0], h.shape[1] // 2
    half = h[:, :cols]
    saved = (*saved_outputs(half, save), *saved_outputs(half, save))
    results = (*EXPERT_ROWS.new_layouts(half)[:2], *saved)
    if rows:
        expert_gate_kernel[(cdiv(rows, ROWS),)](
            h.contiguous(),
            *pointers((None if bias is None else bias.contiguous(),), h),
            score.contiguous(),
            offs,
            *pointers(results, h),
            rows,
            cols,
            offs.shape[0],
            form.alpha,
            form.limit,
            BIAS=bias is not None,
            SAVE=save,
            **_options(h, cols, form),
        )
    return results


def expert_gate_backward(inputs: GateBackwardInputs, form: GateForm) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.expert_gate.expert_gate_backward`."""
    grad, score, *saved = inputs
    rows, cols = grad.shape
    a, dh = EXPERT_ROWS.new_layouts(grad), EXPERT_ROWS.new_layouts(grad, 2 * cols)
    results = (*a[:2], *dh[:2])
    dscore = grad.new_empty(rows, dtype=torch.float32)
    if rows:
        expert_gate_backward_kernel[(cdiv(rows, ROWS),)](
            grad.contiguous(),
            score.contiguous(),
            *pointers((*saved, *results, dscore), grad),
            inputs.gate_scale.stride(1),
            *grad.shape,
            form.alpha,
            form.limit,
            **_options(grad, cols, form, operands=2),
        )
    return (*results, dscore)
