"""SwiGLU's backward that emits FP8: ``dgate`` and ``dup`` of ``h = silu(gate) * up * smooth``.

The rules of `torch_fp8.ops.swiglu` hold. Gradients are rounded to `out_dtype`, and only then cast.

Legend: R rows (tokens), C columns (features); `inputs` of all of them: see `BackwardInputs`.
Results are contiguous.
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
    saved_values,
)
from torch_fp8.ops.registry import operators
from torch_fp8.quantization.scaling import tensor_amax

BACKWARD_ARGUMENTS = (
    "Tensor grad, Tensor gate, Tensor? gate_scale, Tensor up, Tensor? up_scale, Tensor? smooth, "
    "ScalarType out_dtype"
)
"""The fields of `BackwardInputs` as arguments in an operator's schema."""


def swiglu_backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """Compute ``dgate = g * up * (sig + gate * sig * (1 - sig))``, ``dup = g * silu(gate)``.

    With ``sig = sigmoid(gate)`` and ``g = grad * smooth``, in one read.

    Returns:
        dgate and dup, (R, C) of `inputs.out_dtype`.
    """
    return operators.swiglu_backward(*inputs)


def swiglu_backward_amax(inputs: BackwardInputs) -> Tensor:
    """Compute the amaxes, (2,) float32, of what `swiglu_backward` returns, without writing it."""
    return operators.swiglu_backward_amax(*inputs)


def swiglu_backward_quantize(
    inputs: BackwardInputs,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
) -> tuple[Tensor, ...]:
    """Cast `swiglu_backward` to FP8 in the layouts asked for, in one read (rowwise: unfused).

    Args:
        amax: (2,) float32 of `swiglu_backward_amax`, for tensorwise with current scaling.
        scale: (2,) float32, of dgate and dup, for tensorwise with delayed scaling.
        dtype, granularity, power_of_two, row, col: see `swiglu_quantize`.
    Returns:
        ``(q, s, qt, st)`` of dgate, the same of dup, and their amaxes (2,) where `scale` was given,
        empty otherwise: nine tensors.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    return operators.swiglu_backward_quantize(
        *inputs, amax, scale, dtype, granularity, power_of_two, row, col
    )


def swiglu_backward_quantize_delayed(
    inputs: BackwardInputs, of_gate: DelayedCast, of_up: DelayedCast
) -> tuple[Tensor, ...]:
    """Cast as `swiglu_backward_quantize`, with the tensorwise scales that two histories suggest.

    Args:
        of_gate, of_up: the casts of dgate and dup, which differ in the history alone.
    Returns:
        ``(q, scale, qt)`` of dgate, the same of dup, and their amaxes (2,): seven tensors.
    """
    return operators.swiglu_backward_quantize_delayed(
        *inputs, of_up.amaxes, of_up.progress, *of_gate
    )


def swiglu_backward_reference(*args: Any) -> tuple[Tensor, Tensor]:
    """Reference of `swiglu_backward`; all references take the operators' arguments."""
    grad, gate, gate_scale, up, up_scale, smooth, out_dtype = BackwardInputs(*args)
    g, u = saved_values(gate, gate_scale), saved_values(up, up_scale)
    dh = grad.float() if smooth is None else grad.float() * smooth
    sig = g.sigmoid()
    silu = g * sig
    dgate, dup = dh * u * (sig + silu * (1 - sig)), dh * silu
    return dgate.to(out_dtype).contiguous(), dup.to(out_dtype).contiguous()


def swiglu_backward_amax_reference(*args: Any) -> Tensor:
    """Reference of `swiglu_backward_amax`."""
    return torch.stack([tensor_amax(d) for d in swiglu_backward_reference(*args)])


def swiglu_backward_quantize_reference(*args: Any) -> tuple[Tensor, ...]:
    """Reference of `swiglu_backward_quantize`."""
    inputs, (amax, scale, *cast) = args[:NUM_INPUTS], args[NUM_INPUTS:]
    gradients = swiglu_backward_reference(*inputs)
    amaxes = (None, None) if amax is None else amax.unbind()
    scales = (None, None) if scale is None else scale.unbind()
    made: list[Tensor] = []
    for d, its_amax, its_scale in zip(gradients, amaxes, scales, strict=True):
        made += cast_result(d, its_amax, its_scale, *cast)
    if scale is None:
        return (*made, no_amax(gradients[0]))
    return (*made, torch.stack([tensor_amax(d) for d in gradients]))


def swiglu_backward_quantize_delayed_reference(*args: Any) -> tuple[Tensor, ...]:
    """Reference of `swiglu_backward_quantize_delayed`."""
    gradients, casts = swiglu_backward_reference(*args[:NUM_INPUTS]), _two_casts(args[NUM_INPUTS:])
    made = [cast.reference(d) for cast, d in zip(casts, gradients, strict=True)]
    return (*made[0][:3], *made[1][:3], torch.stack([amax for *_, amax in made]))


def _two_casts(args: tuple[Any, ...]) -> tuple[DelayedCast, DelayedCast]:
    up_amaxes, up_progress, *cast = args
    of_gate = DelayedCast(*cast)
    return of_gate, of_gate._replace(amaxes=up_amaxes, progress=up_progress)


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    grad, out_dtype = args[0], args[NUM_INPUTS - 1]
    return grad.new_empty(grad.shape, dtype=out_dtype), grad.new_empty(grad.shape, dtype=out_dtype)


def _backward_amax_fake(grad: Tensor, *args: Any) -> Tensor:
    return grad.new_empty(2, dtype=torch.float32)


def _backward_quantize_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    amax, scale, *cast = args[NUM_INPUTS - 1 :]
    taken = no_amax(grad) if scale is None else _backward_amax_fake(grad)
    of_one: list[Any] = [None if t is None else t[0] for t in (amax, scale)]
    return (*cast_result(grad, *of_one, *cast), *cast_result(grad, *of_one, *cast), taken)


def _backward_delayed_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    casts = _two_casts(args[NUM_INPUTS - 1 :])
    made = [part for cast in casts for part in cast.fake(grad)[:3]]
    return (*made, _backward_amax_fake(grad))


def _kernels() -> Any:
    from torch_fp8.kernels import swiglu_backward

    return swiglu_backward


_SEVEN, _NINE = (", ".join(["Tensor"] * n) for n in (7, 9))

for _schema, _reference, _fake in (
    (
        f"swiglu_backward({BACKWARD_ARGUMENTS}) -> (Tensor, Tensor)",
        swiglu_backward_reference,
        _backward_fake,
    ),
    (
        f"swiglu_backward_amax({BACKWARD_ARGUMENTS}) -> Tensor",
        swiglu_backward_amax_reference,
        _backward_amax_fake,
    ),
    (
        f"swiglu_backward_quantize({BACKWARD_ARGUMENTS}, {CAST_ARGUMENTS}) -> ({_NINE})",
        swiglu_backward_quantize_reference,
        _backward_quantize_fake,
    ),
    (
        f"swiglu_backward_quantize_delayed({BACKWARD_ARGUMENTS}, Tensor up_amaxes, "
        f"Tensor up_progress, {DELAYED_ARGUMENTS}) -> ({_SEVEN})",
        swiglu_backward_quantize_delayed_reference,
        _backward_delayed_fake,
    ),
):
    register(_schema, _reference, _fake, _kernels)
