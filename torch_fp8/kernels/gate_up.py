"""SwiGLU's backward into one gradient on CUDA: the twin of `torch_fp8.ops.gate_up`.

The kernels and what they read and write are those of `torch_fp8.kernels.swiglu_backward`; the two
gradients are told where in one matrix they lie.

Legend: R rows, C columns of gate and of up.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, ProducerCast
from torch_fp8.kernels.fused_launch import Cast, amax_bits, as_amax, cast_unfused
from torch_fp8.kernels.quantize import BLOCK
from torch_fp8.kernels.swiglu import is_fused
from torch_fp8.kernels.swiglu_backward import cast_gradients, store_gradients
from torch_fp8.quantization.payload_shape import Layouts


def gate_up_backward(inputs: BackwardInputs, gate_first: bool) -> Tensor:
    """See `torch_fp8.ops.gate_up.gate_up_backward`."""
    return _plain(inputs, gate_first, None)


def gate_up_backward_amax(inputs: BackwardInputs) -> Tensor:
    """See `torch_fp8.ops.gate_up.gate_up_backward_amax`."""
    largest = amax_bits(inputs.grad)
    store_gradients(inputs, None, None, largest, joined=True)
    return largest.view(torch.float32)


def gate_up_backward_quantize(
    inputs: BackwardInputs, gate_first: bool, options: ProducerCast
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.gate_up.gate_up_backward_quantize`."""
    grad, cast = inputs.grad, Cast.of(options)
    # A block that had a part of both would be a matter of two tiles.
    whole = options.granularity == "tensorwise" or grad.shape[1] % BLOCK == 0
    if whole and is_fused(cast, grad, inputs.gate, inputs.up):
        taken = cast.amax_bits(grad)
        return (*_cast(inputs, gate_first, cast, taken), as_amax(taken))
    largest = amax_bits(grad) if cast.takes_amax else None
    both, amax = _plain(inputs, gate_first, largest), as_amax(largest)
    return (*cast_unfused(both, options, amax), amax)


def _cast(inputs: BackwardInputs, gate_first: bool, cast: Cast, largest: Tensor | None) -> Layouts:
    """Compute the gradient (R, 2 C) in FP8, and its amax where asked for; see `cast_gradients`."""
    made = cast.options.new_layouts(inputs.grad, 2 * inputs.grad.shape[1])
    halves = [_halves(t, dim, gate_first) for t, dim in zip(made, (1, 1, 0, 0), strict=True)]
    dgate, dup = zip(*halves, strict=True)
    cast_gradients(inputs, cast, (*dgate, *dup), largest, joined=True)
    return made


def _plain(inputs: BackwardInputs, gate_first: bool, largest: Tensor | None) -> Tensor:
    """Compute the gradient (R, 2 C) in `inputs.out_dtype`, and its amax."""
    rows, cols = inputs.grad.shape
    both = inputs.grad.new_empty((rows, 2 * cols), dtype=inputs.out_dtype)
    store_gradients(inputs, *_halves(both, 1, gate_first), largest, joined=True)
    return both


def _halves(x: Any, dim: int, gate_first: bool) -> tuple[Any, Any]:
    """Return gate's and up's halves of a matrix, as views; what is no matrix serves for both."""
    if x is None or x.ndim < 2:
        return x, x
    size = x.shape[dim] // 2
    first, second = x.narrow(dim, 0, size), x.narrow(dim, size, size)
    return (first, second) if gate_first else (second, first)
