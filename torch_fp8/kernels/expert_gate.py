"""The gated activation of experts on CUDA: the twin of `torch_fp8.ops.expert_gate`.

These kernels are memory-bound. For each BF16 pair of gate and up, the forward reads 4 bytes twice,
the second time from cache, writes 1 byte, and saves 2 for backward. The backward reads 4 bytes and
writes 3.

Legend: R rows of all experts, I expert width. Launch configurations are fixed.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import EXPERT_ROWS, GateBackwardInputs, GateForm
from torch_fp8.kernels.cast_launch import BLOCK, TYPES, pointers, saved_outputs
from torch_fp8.kernels.expert_gate_kernels import expert_gate_backward_kernel, expert_gate_kernel
from torch_fp8.kernels.launch_math import cdiv

ROWS, WARPS = 4, 4
WIDE = 512
"""Columns of a tile: 16 elements of each operand per thread, half as many in float32. Backward has
more operands and takes half of that. If I is not a multiple of 16, elements move one by one, in
tiles of one group (128 columns).
"""
REGISTERS = 128
"""Limit per thread; left alone, the assembler uses 96 for one variant and spills 8 bytes."""


def _block_cols(x: Tensor, cols: int) -> int:
    return BLOCK if cols % 16 else WIDE >> (x.element_size() == 4)


def expert_gate_quantize(
    h: Tensor, score: Tensor, offs: Tensor, bias: Tensor | None, form: GateForm, save: bool
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.expert_gate.expert_gate_quantize`."""
    rows, cols = h.shape[0], h.shape[1] // 2
    half = h[:, :cols]
    payload = EXPERT_ROWS.new_layouts(half)[:2]
    saved = (*saved_outputs(half, save), *saved_outputs(half, save))
    if rows:
        expert_gate_kernel[(cdiv(rows, ROWS),)](
            h.contiguous(),
            *pointers((None if bias is None else bias.contiguous(),), h),
            score.contiguous(),
            offs,
            *pointers((*payload, *saved), h),
            rows,
            cols,
            offs.shape[0],
            form.alpha,
            form.limit,
            OUT=TYPES[h.dtype],
            BIAS=bias is not None,
            CLAMPED=form.clamped,
            INTERLEAVED=form.interleaved,
            SAVE=save,
            BLOCK_R=ROWS,
            BLOCK_C=_block_cols(h, cols),
            num_warps=WARPS,
            enable_fp_fusion=False,
            maxnreg=REGISTERS,
        )
    return (*payload, *saved)


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
            rows,
            cols,
            form.alpha,
            form.limit,
            OUT=TYPES[grad.dtype],
            CLAMPED=form.clamped,
            INTERLEAVED=form.interleaved,
            BLOCK_R=ROWS,
            BLOCK_C=max(_block_cols(grad, cols) // 2, BLOCK),
            num_warps=WARPS,
            enable_fp_fusion=False,
            maxnreg=REGISTERS,
        )
    return (*results, dscore)
