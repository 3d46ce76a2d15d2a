"""SwiGLU that emits FP8: ``h = silu(gate) * up``, or ``h * smooth``, and its backward.

Shazeer, arXiv 2002.05202; ``silu(g) = g * sigmoid(g)``. Smooth-SwiGLU (arXiv 2409.12517 section 4)
multiplies every channel of h by a factor that keeps its outliers within FP8's range and divides the
next weight's column by it: `smooth` is that factor, a constant to backward.

Float32 inside; h is rounded once, to the dtype of gate, as by a gated MLP that returns it, and only
then cast: the bytes are those of the rounded h put through ``torch_fp8::quantize_2d``. Likewise the
gradients, which are rounded to `out_dtype`.

Every operator is opaque to torch.compile, plain torch on the CPU and a Triton kernel on CUDA. The
two round the same values to the same bytes; exp differs in its last bits between a processor's
library and a card, so that now and then an h is the neighbouring BF16, and rarely its FP8 code too.

Legend: R rows (tokens), C columns (features). Inputs have any strides, results are contiguous.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.operators import operators
from torch_fp8.producer_cast import (
    cast_result,
    no_amax,
    register,
    save_input,
    saved_values,
)
from torch_fp8.scaling import tensor_amax


def swiglu_save(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gate and up as backward saves them, and the amax of h, from one read.

    Args:
        gate, up: (R, C) float32, bfloat16 or float16, of one dtype.
        smooth: (C,) float32 factor of each channel, or None.
        save: False: the amax alone.
    Returns:
        gate in E4M3 (R, C) and its power-of-two scale (R, ceil(C / 128)), the same of up, all empty
        unless `save`; amax () float32, NaN if any element of h is.
    """
    return operators.swiglu_save(gate, up, smooth, save)


def swiglu(gate: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor:
    """``silu(gate) * up``, times `smooth`: (R, C) of gate's dtype, rounded once.

    Args:
        gate, up, smooth: as of `swiglu_save`.
    """
    return operators.swiglu(gate, up, smooth)


def swiglu_quantize(
    gate: Tensor,
    up: Tensor,
    smooth: Tensor | None,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
    save: bool,
) -> tuple[Tensor, ...]:
    """`swiglu` cast to FP8 in the layouts asked for, in one read (rowwise: unfused).

    Args:
        gate, up, smooth: as of `swiglu_save`.
        amax: () float32 of `swiglu_save`, for tensorwise with current scaling.
        scale: () float32 dequantization scale, for tensorwise with delayed scaling.
        dtype: float8_e4m3fn or float8_e5m2.
        granularity: see `torch_fp8.recipe`.
        power_of_two: round scales up to powers of two.
        row, col: the layouts to make.
        save: whether to return gate and up as `swiglu_save` does, from the same read.
    Returns:
        ``(q, s, qt, st, gate_q, gate_s, up_q, up_s, amax)``, the first four as told in
        `torch_fp8.producer_cast`; amax () is that of h where `scale` was given, for its history,
        and empty otherwise.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    return operators.swiglu_quantize(
        gate, up, smooth, amax, scale, dtype, granularity, power_of_two, row, col, save
    )


def swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``dgate = g * up * (sig + gate * sig * (1 - sig))``, ``dup = g * silu(gate)``.

    With ``sig = sigmoid(gate)`` and ``g = grad * smooth``, in one read.

    Args:
        grad: (R, C) float32, bfloat16 or float16, the gradient of h.
        gate, up: (R, C), or, with their scales, the FP8 that was saved of them.
        gate_scale, up_scale: (R, ceil(C / 128)) float32 or None.
        smooth: (C,) float32 or None.
        out_dtype: of the gradients.
    Returns:
        dgate and dup, (R, C) of `out_dtype`.
    """
    return operators.swiglu_backward(grad, gate, gate_scale, up, up_scale, smooth, out_dtype)


def swiglu_backward_amax(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(2,) float32: the amaxes of what `swiglu_backward` returns, which is not written.

    Args:
        grad, gate, gate_scale, up, up_scale, smooth, out_dtype: as of `swiglu_backward`.
    """
    return operators.swiglu_backward_amax(grad, gate, gate_scale, up, up_scale, smooth, out_dtype)


def swiglu_backward_quantize(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
) -> tuple[Tensor, ...]:
    """`swiglu_backward` cast to FP8 in the layouts asked for, in one read (rowwise: unfused).

    Args:
        grad, gate, gate_scale, up, up_scale, smooth, out_dtype: as of `swiglu_backward`.
        amax: (2,) float32 of `swiglu_backward_amax`, for tensorwise with current scaling.
        scale: (2,) float32, of dgate and dup, for tensorwise with delayed scaling.
        dtype, granularity, power_of_two, row, col: as of `swiglu_quantize`.
    Returns:
        ``(q, s, qt, st)`` of dgate, the same of dup, and their amaxes (2,) where `scale` was given,
        empty otherwise: nine tensors.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    return operators.swiglu_backward_quantize(
        grad,
        gate,
        gate_scale,
        up,
        up_scale,
        smooth,
        out_dtype,
        amax,
        scale,
        dtype,
        granularity,
        power_of_two,
        row,
        col,
    )


def swiglu_reference(gate: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor:
    """The reference of `swiglu`."""
    g = gate.float()
    h = g * g.sigmoid() * up.float()
    return (h if smooth is None else h * smooth).to(gate.dtype).contiguous()


def swiglu_save_reference(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The reference of `swiglu_save`."""
    amax = tensor_amax(swiglu_reference(gate, up, smooth))
    return (*save_input(gate, save), *save_input(up, save), amax)


def swiglu_quantize_reference(
    gate: Tensor,
    up: Tensor,
    smooth: Tensor | None,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
    save: bool,
) -> tuple[Tensor, ...]:
    """The reference of `swiglu_quantize`."""
    h = swiglu_reference(gate, up, smooth)
    made = cast_result(h, amax, scale, dtype, granularity, power_of_two, row, col)
    saved = (*save_input(gate, save), *save_input(up, save))
    return (*made, *saved, no_amax(h) if scale is None else tensor_amax(h))


def swiglu_backward_reference(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The reference of `swiglu_backward`."""
    g, u = saved_values(gate, gate_scale), saved_values(up, up_scale)
    dh = grad.float() if smooth is None else grad.float() * smooth
    sig = g.sigmoid()
    silu = g * sig
    dgate, dup = dh * u * (sig + silu * (1 - sig)), dh * silu
    return dgate.to(out_dtype).contiguous(), dup.to(out_dtype).contiguous()


def swiglu_backward_amax_reference(grad: Tensor, *inputs: Any) -> Tensor:
    """The reference of `swiglu_backward_amax`."""
    return torch.stack([tensor_amax(d) for d in swiglu_backward_reference(grad, *inputs)])


def swiglu_backward_quantize_reference(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The reference of `swiglu_backward_quantize`."""
    inputs, (amax, scale, *cast) = args[:6], args[6:]
    gradients = swiglu_backward_reference(grad, *inputs)
    amaxes = (None, None) if amax is None else amax.unbind()
    scales = (None, None) if scale is None else scale.unbind()
    made: list[Tensor] = []
    for d, its_amax, its_scale in zip(gradients, amaxes, scales, strict=True):
        made += cast_result(d, its_amax, its_scale, *cast)
    taken = [tensor_amax(d) for d in gradients] if scale is not None else []
    return (*made, torch.stack(taken) if taken else no_amax(grad))


def _save_fake(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True
) -> tuple[Tensor, ...]:
    amax = gate.new_empty((), dtype=torch.float32)
    return (*save_input(gate, save), *save_input(up, save), amax)


def _swiglu_fake(gate: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape)


def _quantize_fake(
    gate: Tensor,
    up: Tensor,
    smooth: Tensor | None,
    amax: Tensor | None,
    scale: Tensor | None,
    *cast_and_save: Any,
) -> tuple[Tensor, ...]:
    *cast, save = cast_and_save
    taken = no_amax(gate) if scale is None else gate.new_empty((), dtype=torch.float32)
    saved = (*save_input(gate, save), *save_input(up, save))
    return (*cast_result(gate, amax, scale, *cast), *saved, taken)


def _backward_fake(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    out_dtype = inputs[-1]
    return grad.new_empty(grad.shape, dtype=out_dtype), grad.new_empty(grad.shape, dtype=out_dtype)


def _backward_amax_fake(grad: Tensor, *inputs: Any) -> Tensor:
    return grad.new_empty(2, dtype=torch.float32)


def _backward_quantize_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    amax, scale, *cast = args[6:]
    taken = no_amax(grad) if scale is None else grad.new_empty(2, dtype=torch.float32)
    of_one: list[Any] = [None if t is None else t[0] for t in (amax, scale)]
    return (*cast_result(grad, *of_one, *cast), *cast_result(grad, *of_one, *cast), taken)


def _kernels() -> Any:
    from torch_fp8.kernels import swiglu

    return swiglu


_FORWARD = "Tensor gate, Tensor up, Tensor? smooth"
BACKWARD_ARGUMENTS = (
    "Tensor grad, Tensor gate, Tensor? gate_scale, Tensor up, Tensor? up_scale, Tensor? smooth, "
    "ScalarType out_dtype"
)
CAST_ARGUMENTS = (
    "Tensor? amax, Tensor? scale, ScalarType dtype, str granularity, bool power_of_two, "
    "bool row, bool col"
)
_NINE = ", ".join(["Tensor"] * 9)

for _schema, _reference, _fake in (
    (
        f"swiglu_save({_FORWARD}, bool save=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        swiglu_save_reference,
        _save_fake,
    ),
    (f"swiglu({_FORWARD}) -> Tensor", swiglu_reference, _swiglu_fake),
    (
        f"swiglu_quantize({_FORWARD}, {CAST_ARGUMENTS}, bool save) -> ({_NINE})",
        swiglu_quantize_reference,
        _quantize_fake,
    ),
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
):
    register(_schema, _reference, _fake, _kernels)
