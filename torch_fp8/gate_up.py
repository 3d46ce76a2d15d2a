"""SwiGLU's backward where gate and up are the halves of one linear layer's output.

Forward takes them as they lie, as two strided views (`torch_fp8.swiglu`). Backward has one gradient
to hand over, (R, 2 C), with one scale for both halves where a tensor has one: these operators write
both halves into one buffer, plain or in FP8, which the layer's dgrad and wgrad take as it is.

Formulas, rounding and the rules of `torch_fp8.swiglu_backward` hold: the bytes are those of the two
gradients, side by side, put through ``torch_fp8::quantize_2d``.

Legend: R rows (tokens), C columns of gate and of up.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.operators import operators
from torch_fp8.producer_cast import (
    CAST_ARGUMENTS,
    DELAYED_ARGUMENTS,
    DelayedCast,
    Layouts,
    cast_result,
    no_amax,
    register,
)
from torch_fp8.scaling import tensor_amax
from torch_fp8.swiglu_backward import BACKWARD_ARGUMENTS, swiglu_backward_reference


def halves(both: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """gate and up, (..., C), views of (..., 2 C)."""
    first, second = both.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


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
    """Both results of `swiglu_backward` in one matrix: (R, 2 C) of `out_dtype`.

    Args:
        grad, gate, gate_scale, up, up_scale, smooth, out_dtype: as of `swiglu_backward`.
        gate_first: whether dgate is the first half of each row.
    """
    return operators.gate_up_backward(
        grad, gate, gate_scale, up, up_scale, smooth, out_dtype, gate_first
    )


def gate_up_backward_amax(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """() float32: the amax of what `gate_up_backward` returns, which is not written.

    Args:
        grad, gate, gate_scale, up, up_scale, smooth, out_dtype: as there.
    """
    return operators.gate_up_backward_amax(grad, gate, gate_scale, up, up_scale, smooth, out_dtype)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`gate_up_backward` cast to FP8 in the layouts asked for, in one read.

    Unfused, on CUDA, rowwise, where C is no multiple of 16, and in blocks where it is none of 128,
    so that a block would have a part of both halves.

    Args:
        grad, gate, gate_scale, up, up_scale, smooth, out_dtype, gate_first: as there.
        amax: () float32 of `gate_up_backward_amax`, for tensorwise with current scaling.
        scale: () float32 dequantization scale, for tensorwise with delayed scaling.
        dtype, granularity, power_of_two, row, col: as of `swiglu_quantize`.
    Returns:
        ``(q, s, qt, st, amax)``, the first four as told in `torch_fp8.producer_cast`; amax () where
        `scale` was given, and empty otherwise.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    return operators.gate_up_backward_quantize(
        grad,
        gate,
        gate_scale,
        up,
        up_scale,
        smooth,
        out_dtype,
        gate_first,
        amax,
        scale,
        dtype,
        granularity,
        power_of_two,
        row,
        col,
    )


def gate_up_backward_quantize_delayed(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
    gate_first: bool,
    how: DelayedCast,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gate_up_backward_quantize` with the tensorwise scale that a history suggests.

    Args:
        grad, gate, gate_scale, up, up_scale, smooth, out_dtype, gate_first: as there.
        how: the cast.
    Returns:
        ``(q, scale, qt, amax)``; scale () and amax () float32.
    """
    inputs = (grad, gate, gate_scale, up, up_scale, smooth, out_dtype, gate_first)
    return operators.gate_up_backward_quantize_delayed(*inputs, *how)


def gate_up_backward_reference(grad: Tensor, *args: Any) -> Tensor:
    """The reference of `gate_up_backward`."""
    *inputs, gate_first = args
    dgate, dup = swiglu_backward_reference(grad, *inputs)
    return torch.cat([dgate, dup] if gate_first else [dup, dgate], dim=1)


def gate_up_backward_amax_reference(grad: Tensor, *inputs: Any) -> Tensor:
    """The reference of `gate_up_backward_amax`."""
    return tensor_amax(gate_up_backward_reference(grad, *inputs, True))


def gate_up_backward_quantize_reference(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The reference of `gate_up_backward_quantize`."""
    inputs, (amax, scale, *cast) = args[:7], args[7:]
    both = gate_up_backward_reference(grad, *inputs)
    made = cast_result(both, amax, scale, *cast)
    return (*made, no_amax(grad) if scale is None else tensor_amax(both))


def gate_up_backward_quantize_delayed_reference(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The reference of `gate_up_backward_quantize_delayed`."""
    return DelayedCast(*args[7:]).reference(gate_up_backward_reference(grad, *args[:7]))


def _backward_fake(grad: Tensor, *args: Any) -> Tensor:
    rows, cols = grad.shape
    return grad.new_empty((rows, 2 * cols), dtype=args[5])


def _amax_fake(grad: Tensor, *inputs: Any) -> Tensor:
    return grad.new_empty((), dtype=torch.float32)


def _quantize_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    amax, scale, *cast = args[7:]
    made: Layouts = cast_result(_backward_fake(grad, *args), amax, scale, *cast)
    return (*made, no_amax(grad) if scale is None else _amax_fake(grad))


def _delayed_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return DelayedCast(*args[7:]).fake(_backward_fake(grad, *args))


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
