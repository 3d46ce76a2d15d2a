"""SwiGLU's backward that emits FP8: ``dgate`` and ``dup`` of ``h = silu(gate) * up * smooth``.

The rules of `torch_fp8.ops.swiglu` hold. Gradients are rounded to `out_dtype`, and only then cast.

Legend: R rows (tokens), C columns (features); `inputs` of all of them: see `BackwardInputs`.
Results are contiguous.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions, DelayedCastOptions
from torch_fp8.ops.fused_quantize import cast_result, cast_result_fake, saved_values
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.scaling import tensor_amax


def _kernels() -> Any:
    from torch_fp8.kernels import swiglu_backward

    return swiglu_backward


def _backward_fake(inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    dgate, dup = (inputs.grad.new_empty(inputs.grad.shape, dtype=inputs.out_dtype) for _ in "12")
    return dgate, dup


@operator(_backward_fake, _kernels)
def swiglu_backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """Compute ``dgate = g * up * (sig + gate * sig * (1 - sig))``, ``dup = g * silu(gate)``.

    With ``sig = sigmoid(gate)`` and ``g = grad * smooth``, in one read.

    Returns:
        dgate and dup, (R, C) of `inputs.out_dtype`.
    """
    grad, gate, gate_scale, up, up_scale, smooth, out_dtype = inputs
    g, u = saved_values(gate, gate_scale), saved_values(up, up_scale)
    dh = grad.float() if smooth is None else grad.float() * smooth
    sig = g.sigmoid()
    silu = g * sig
    dgate, dup = dh * u * (sig + silu * (1 - sig)), dh * silu
    return dgate.to(out_dtype).contiguous(), dup.to(out_dtype).contiguous()


def _amax_fake(inputs: BackwardInputs) -> Tensor:
    return inputs.grad.new_empty(2, dtype=torch.float32)


@operator(_amax_fake, _kernels)
def swiglu_backward_amax(inputs: BackwardInputs) -> Tensor:
    """Compute the amaxes, (2,) float32, of what `swiglu_backward` returns, without writing it."""
    return torch.stack([tensor_amax(d) for d in swiglu_backward.reference(inputs)])


def _quantize_fake(inputs: BackwardInputs, options: CastOptions) -> tuple[Tensor | None, ...]:
    grad = inputs.grad
    made = (part for i in range(2) for part in cast_result_fake(grad, options.part(i))[:4])
    return (*made, None if options.scale is None else _amax_fake(inputs))


@operator(_quantize_fake, _kernels, results=9)
def swiglu_backward_quantize(
    inputs: BackwardInputs, options: CastOptions
) -> tuple[Tensor | None, ...]:
    """Cast `swiglu_backward` to FP8 in the layouts asked for, in one read (rowwise: unfused).

    Args:
        options: the cast; tensorwise with the amaxes (2,) of `swiglu_backward_amax`, or with the
            scales (2,) of dgate and dup.
    Returns:
        ``(q, s, qt, st)`` of dgate, the same of dup, and their amaxes (2,) where scales were given,
        else None: nine.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    gradients = swiglu_backward.reference(inputs)
    made = [cast_result(d, options.part(i)) for i, d in enumerate(gradients)]
    taken = None if options.scale is None else torch.stack([one[4] for one in made])
    return (*made[0][:4], *made[1][:4], taken)


def _delayed_fake(
    inputs: BackwardInputs, up_amaxes: Tensor, up_progress: Tensor, of_gate: DelayedCastOptions
) -> tuple[Tensor | None, ...]:
    dgate, dup = (cast_result_fake(inputs.grad, of_gate)[:3] for _ in "12")
    return (*dgate, *dup, _amax_fake(inputs))


@operator(_delayed_fake, _kernels, results=7)
def swiglu_backward_quantize_delayed(
    inputs: BackwardInputs, up_amaxes: Tensor, up_progress: Tensor, of_gate: DelayedCastOptions
) -> tuple[Any, ...]:
    """Cast as `swiglu_backward_quantize`, with the tensorwise scales that two histories suggest.

    Args:
        up_amaxes, up_progress: the history of dup.
        of_gate: the cast of dgate, and, but for the history, that of dup.
    Returns:
        ``(q, scale, qt)`` of dgate, the same of dup, and their amaxes (2,): seven tensors.
    """
    dgate, dup = swiglu_backward.reference(inputs)
    of_up = of_gate._replace(amaxes=up_amaxes, progress=up_progress)
    made, made_up = cast_result(dgate, of_gate), cast_result(dup, of_up)
    return (*made[:3], *made_up[:3], torch.stack([made[4], made_up[4]]))
