"""SwiGLU's backward where gate and up are the halves of one linear layer's output.

Forward takes them as they lie, as two strided views (`torch_fp8.ops.swiglu`). Backward has one
gradient to hand over, (R, 2 C), with one scale for both halves where a tensor has one: these
operators write both halves into one buffer, plain or in FP8, which the layer's dgrad and wgrad take
as it is.

Formulas, rounding and the rules of `torch_fp8.ops.swiglu_backward` hold: the bytes are those of the
two gradients, side by side, put through ``torch_fp8::quantize_2d``.

Legend: R rows (tokens), C columns of gate and of up; `inputs` of all of them: see `BackwardInputs`.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import NUM_INPUTS, BackwardInputs
from torch_fp8.ops.fused_quantize import (
    CAST_ARGUMENTS,
    DELAYED_ARGUMENTS,
    DelayedCast,
    cast_result,
    no_amax,
    register,
)
from torch_fp8.ops.registry import operators
from torch_fp8.ops.swiglu_backward import BACKWARD_ARGUMENTS, swiglu_backward_reference
from torch_fp8.quantization.payload_shape import Layouts
from torch_fp8.quantization.scaling import tensor_amax

_NUM_PLAIN = NUM_INPUTS + 1  # with gate_first: the arguments of `gate_up_backward`


def halves(both: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up, (..., C), as views of `both` (..., 2 C)."""
    first, second = both.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def gate_up_backward(inputs: BackwardInputs, gate_first: bool) -> Tensor:
    """Compute both results of `swiglu_backward` in one matrix, (R, 2 C) of `inputs.out_dtype`.

    Args:
        gate_first: whether dgate is the first half of each row.
    """
    return operators.gate_up_backward(*inputs, gate_first)


def gate_up_backward_amax(inputs: BackwardInputs) -> Tensor:
    """Compute the amax, () float32, of what `gate_up_backward` returns, without writing it."""
    return operators.gate_up_backward_amax(*inputs)


def gate_up_backward_quantize(
    inputs: BackwardInputs,
    gate_first: bool,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cast `gate_up_backward` to FP8 in the layouts asked for, in one read.

    Unfused, on CUDA, rowwise, where C is no multiple of 16, and in blocks where it is none of 128,
    so that a block would have a part of both halves.

    Args:
        gate_first: see `gate_up_backward`.
        amax: () float32 of `gate_up_backward_amax`, for tensorwise with current scaling.
        scale: () float32 dequantization scale, for tensorwise with delayed scaling.
        dtype, granularity, power_of_two, row, col: see `swiglu_quantize`.
    Returns:
        ``(q, s, qt, st, amax)``, the first four as told in `torch_fp8.ops.fused_quantize`; amax ()
        where `scale` was given, and empty otherwise.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    return operators.gate_up_backward_quantize(
        *inputs, gate_first, amax, scale, dtype, granularity, power_of_two, row, col
    )


def gate_up_backward_quantize_delayed(
    inputs: BackwardInputs, gate_first: bool, how: DelayedCast
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast as `gate_up_backward_quantize`, with the tensorwise scale that a history suggests.

    Args:
        gate_first: see `gate_up_backward`.
        how: the cast.
    Returns:
        ``(q, scale, qt, amax)``; scale () and amax () float32.
    """
    return operators.gate_up_backward_quantize_delayed(*inputs, gate_first, *how)


def gate_up_backward_reference(*args: Any) -> Tensor:
    """Reference of `gate_up_backward`."""
    *inputs, gate_first = args
    dgate, dup = swiglu_backward_reference(*inputs)
    return torch.cat([dgate, dup] if gate_first else [dup, dgate], dim=1)


def gate_up_backward_amax_reference(*args: Any) -> Tensor:
    """Reference of `gate_up_backward_amax`."""
    return tensor_amax(gate_up_backward_reference(*args, True))


def gate_up_backward_quantize_reference(*args: Any) -> tuple[Tensor, ...]:
    """Reference of `gate_up_backward_quantize`."""
    both, (amax, scale, *cast) = gate_up_backward_reference(*args[:_NUM_PLAIN]), args[_NUM_PLAIN:]
    made = cast_result(both, amax, scale, *cast)
    return (*made, no_amax(both) if scale is None else tensor_amax(both))


def gate_up_backward_quantize_delayed_reference(*args: Any) -> tuple[Tensor, ...]:
    """Reference of `gate_up_backward_quantize_delayed`."""
    both = gate_up_backward_reference(*args[:_NUM_PLAIN])
    return DelayedCast(*args[_NUM_PLAIN:]).reference(both)


def _backward_fake(*args: Any) -> Tensor:
    grad, out_dtype = args[0], args[NUM_INPUTS - 1]
    rows, cols = grad.shape
    both: Tensor = grad.new_empty((rows, 2 * cols), dtype=out_dtype)
    return both


def _amax_fake(grad: Tensor, *args: Any) -> Tensor:
    return grad.new_empty((), dtype=torch.float32)


def _quantize_fake(*args: Any) -> tuple[Tensor, ...]:
    both, (amax, scale, *cast) = _backward_fake(*args[:_NUM_PLAIN]), args[_NUM_PLAIN:]
    made: Layouts = cast_result(both, amax, scale, *cast)
    return (*made, no_amax(both) if scale is None else _amax_fake(both))


def _delayed_fake(*args: Any) -> tuple[Tensor, ...]:
    return DelayedCast(*args[_NUM_PLAIN:]).fake(_backward_fake(*args[:_NUM_PLAIN]))


def _kernels() -> Any:
    from torch_fp8.kernels import gate_up

    return gate_up


for _schema, _reference, _fake in (
    (
        f"gate_up_backward({BACKWARD_ARGUMENTS}, bool gate_first) -> Tensor",
        gate_up_backward_reference,
        _backward_fake,
    ),
    (
        f"gate_up_backward_amax({BACKWARD_ARGUMENTS}) -> Tensor",
        gate_up_backward_amax_reference,
        _amax_fake,
    ),
    (
        f"gate_up_backward_quantize({BACKWARD_ARGUMENTS}, bool gate_first, {CAST_ARGUMENTS}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        gate_up_backward_quantize_reference,
        _quantize_fake,
    ),
    (
        f"gate_up_backward_quantize_delayed({BACKWARD_ARGUMENTS}, bool gate_first, "
        f"{DELAYED_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
        gate_up_backward_quantize_delayed_reference,
        _delayed_fake,
    ),
):
    register(_schema, _reference, _fake, _kernels)
