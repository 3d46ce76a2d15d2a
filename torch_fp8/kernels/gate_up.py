"""SwiGLU's backward into one matrix on CUDA: the twin of `torch_fp8.ops.gate_up`.

The kernels and their memory traffic are those of `torch_fp8.kernels.swiglu_backward`; they write
the two gradients into the halves of one matrix (R, 2C).

Legend: R rows, C columns of gate and of up.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
)
from torch_fp8.kernels.fused_launch import amax_bits
from torch_fp8.kernels.quantize import (
    quantize_2d,
)
from torch_fp8.kernels.swiglu_backward import cast_gradients, casts_at_once, store_gradients
from torch_fp8.quantization.payload_shape import Layouts


def gate_up_backward(inputs: BackwardInputs, gate_first: bool) -> Tensor:
    """See `torch_fp8.ops.gate_up.gate_up_backward`."""
    rows, cols = inputs.grad.shape
    both = inputs.grad.new_empty((rows, 2 * cols), dtype=inputs.out_dtype)
    store_gradients(inputs, *_halves(both, 1, gate_first), None, joined=True)
    return both


def gate_up_backward_amax(inputs: BackwardInputs) -> Tensor:
    """See `torch_fp8.ops.gate_up.gate_up_backward_amax`."""
    largest = amax_bits(inputs.grad)
    store_gradients(inputs, None, None, largest, joined=True)
    return largest.view(torch.float32)


def gate_up_backward_quantize(
    inputs: BackwardInputs, gate_first: bool, options: CastOptions
) -> Layouts:
    """See `torch_fp8.ops.gate_up.gate_up_backward_quantize`."""
    grad = inputs.grad
    # A block with columns of both gradients would span two tiles.
    whole = options.granularity == "tensorwise" or grad.shape[1] % BLOCK == 0
    if not (whole and casts_at_once(inputs, options)):
        return quantize_2d(gate_up_backward(inputs, gate_first), options)
    made = options.new_layouts(grad, 2 * grad.shape[1])
    halves = [_halves(t, dim, gate_first) for t, dim in zip(made, (1, 1, 0, 0), strict=True)]
    dgate, dup = zip(*halves, strict=True)
    cast_gradients(inputs, (options, options), (*dgate, *dup), joined=True)
    return made


def _halves(x: Any, dim: int, gate_first: bool) -> tuple[Any, Any]:
    """Return views of gate's and up's halves of a matrix; both share a scalar scale or None."""
    if x is None or x.ndim < 2:
        return x, x
    size = x.shape[dim] // 2
    first, second = x.narrow(dim, 0, size), x.narrow(dim, size, size)
    return (first, second) if gate_first else (second, first)
