"""SwiGLU's backward on CUDA into one gradient: the twin of `torch_fp8.gate_up`.

The kernels and what they read and write are those of `torch_fp8.kernels.swiglu_backward`; the two
gradients are told where in one matrix they lie.

Legend: R rows, C columns of gate and of up.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.producers import Cast, Layouts, amax_bits
from torch_fp8.kernels.quantize import BLOCK
from torch_fp8.kernels.swiglu import is_fused
from torch_fp8.kernels.swiglu_backward import Inputs, cast_gradients, store_gradients


def gate_up_backward(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
    gate_first: bool,
) -> Tensor:
    """See `torch_fp8.gate_up.gate_up_backward`."""
    return _plain((grad, gate, gate_scale, up, up_scale, smooth), out_dtype, gate_first, None)


def gate_up_backward_amax(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `torch_fp8.gate_up.gate_up_backward_amax`."""
    largest = amax_bits(grad)
    inputs: Inputs = (grad, gate, gate_scale, up, up_scale, smooth)
    store_gradients(inputs, out_dtype, None, None, largest, joined=True)
    return largest.view(torch.float32)


def gate_up_backward_quantize(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
    gate_first: bool,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
) -> tuple[Tensor, ...]:
    """See `torch_fp8.gate_up.gate_up_backward_quantize`."""
    inputs: Inputs = (grad, gate, gate_scale, up, up_scale, smooth)
    cast = Cast(amax, scale, dtype, granularity, power_of_two, row, col)
    largest = amax_bits(grad) if scale is not None else amax_bits(grad, 0)
    cols = grad.shape[1]
    # A block that had a part of both would be a matter of two tiles.
    whole = granularity == "tensorwise" or cols % BLOCK == 0
    if whole and is_fused(cast, grad, gate, up):
        made = _cast(inputs, out_dtype, gate_first, cast, largest)
    else:
        taken = None if scale is None else largest
        made = cast.unfused(_plain(inputs, out_dtype, gate_first, taken))
    return (*made, largest.view(torch.float32))


def gate_up_backward_quantize_delayed(grad: Tensor, *inputs_and_how: Any) -> tuple[Tensor, ...]:
    """See `torch_fp8.gate_up.gate_up_backward_quantize_delayed`."""
    *operands, out_dtype, gate_first = inputs_and_how[:7]
    inputs: Inputs = (grad, *operands)
    cast = Cast.delayed(*inputs_and_how[7:])
    if is_fused(cast, grad, operands[0], operands[2]):
        largest = grad.new_empty((), dtype=torch.int32)
        q, s, qt, _ = _cast(inputs, out_dtype, gate_first, cast, largest)
        return q, s, qt, largest.view(torch.float32)
    largest = amax_bits(grad)
    both = _plain(inputs, out_dtype, gate_first, largest)
    amax = largest.view(torch.float32)
    cast = cast.known(amax)
    q, _, qt, _ = cast.unfused(both)
    assert cast.scale is not None
    return q, cast.scale, qt, amax


def _cast(
    inputs: Inputs, out_dtype: torch.dtype, gate_first: bool, cast: Cast, largest: Tensor
) -> Layouts:
    """The gradient (R, 2 C) in FP8, and its amax where that is taken; see `cast_gradients`."""
    grad = inputs[0]
    made = cast.outputs(grad, 2 * grad.shape[1])
    halves = [_halves(t, dim, gate_first) for t, dim in zip(made, (1, 1, 0, 0), strict=True)]
    dgate, dup = zip(*halves, strict=True)
    cast_gradients(inputs, out_dtype, cast, (*dgate, *dup), largest, joined=True)
    return made


def _plain(
    inputs: Inputs, out_dtype: torch.dtype, gate_first: bool, largest: Tensor | None
) -> Tensor:
    """The gradient (R, 2 C) of `out_dtype`, and its amax."""
    grad = inputs[0]
    rows, cols = grad.shape
    both = grad.new_empty((rows, 2 * cols), dtype=out_dtype)
    store_gradients(inputs, out_dtype, *_halves(both, 1, gate_first), largest, joined=True)
    return both


def _halves(x: Tensor, dim: int, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Gate's half of a matrix and up's, as views; what is no matrix serves both."""
    if x.ndim < 2:
        return x, x
    size = x.shape[dim] // 2
    first, second = x.narrow(dim, 0, size), x.narrow(dim, size, size)
    return (first, second) if gate_first else (second, first)
