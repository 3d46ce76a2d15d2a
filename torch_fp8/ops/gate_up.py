"""SwiGLU's backward for gate and up that are the halves of one linear layer's output.

Forward reads them as two strided views (`torch_fp8.ops.swiglu`). Backward must return one gradient,
(R, 2 C), and a tensorwise scale covers both halves. These operators write both halves into one
buffer, plain or in FP8, which the layer's dgrad and wgrad read directly.

Formulas and rounding are those of `torch_fp8.ops.swiglu_backward`: the bytes equal those of the two
gradients side by side, cast by ``torch_fp8::quantize_2d``.

Legend: R rows (tokens), C columns of gate and of up; `inputs` of all operators: see
`BackwardInputs`.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.ops.fused_quantize import cast_result, cast_result_fake
from torch_fp8.ops.registry import operator
from torch_fp8.ops.swiglu_backward import swiglu_backward
from torch_fp8.quantization.payload_shape import Layouts
from torch_fp8.quantization.scaling import tensor_amax


def halves(both: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up, (..., C), as views of `both` (..., 2 C)."""
    first, second = both.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def _backward_fake(inputs: BackwardInputs, gate_first: bool) -> Tensor:
    rows, cols = inputs.grad.shape
    return inputs.grad.new_empty((rows, 2 * cols), dtype=inputs.out_dtype)


@operator(_backward_fake)
def gate_up_backward(inputs: BackwardInputs, gate_first: bool) -> Tensor:
    """Compute both results of `swiglu_backward` in one matrix, (R, 2 C) of `inputs.out_dtype`.

    Args:
        inputs: see `BackwardInputs`.
        gate_first: whether dgate is the first half of each row.
    """
    dgate, dup = swiglu_backward.reference(inputs)
    return torch.cat([dgate, dup] if gate_first else [dup, dgate], dim=1)


def _amax_fake(inputs: BackwardInputs) -> Tensor:
    return inputs.grad.new_empty((), dtype=torch.float32)


@operator(_amax_fake)
def gate_up_backward_amax(inputs: BackwardInputs) -> Tensor:
    """Compute the amax, () float32, of the result of `gate_up_backward` without writing that."""
    return tensor_amax(gate_up_backward.reference(inputs, True))


def _quantize_fake(inputs: BackwardInputs, gate_first: bool, options: CastOptions) -> Layouts:
    return cast_result_fake(_backward_fake(inputs, gate_first), options)


@operator(_quantize_fake)
def gate_up_backward_quantize(
    inputs: BackwardInputs, gate_first: bool, options: CastOptions
) -> Layouts:
    """Cast `gate_up_backward` to FP8 in the requested layouts, in one read.

    On CUDA this is not fused for rowwise casts, if C is not a multiple of 16, and for blocks if C
    is not a multiple of 128, because a block would then contain parts of both halves.

    Args:
        inputs: see `BackwardInputs`.
        gate_first: see `gate_up_backward`.
        options: the cast; tensorwise with the amax of `gate_up_backward_amax`, or with a scale,
            whose slot is raised to the amax of both halves.
    Returns:
        See `Layouts`.
    Raises:
        ValueError: if a tensorwise cast has neither amax nor scale, or another one has any.
    """
    return cast_result(gate_up_backward.reference(inputs, gate_first), options)
