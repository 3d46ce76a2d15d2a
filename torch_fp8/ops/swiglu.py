"""SwiGLU that emits FP8: ``h = silu(gate) * up``, or ``h * smooth``.

Shazeer, arXiv 2002.05202; ``silu(g) = g * sigmoid(g)``. Smooth-SwiGLU (arXiv 2409.12517 section 4)
multiplies every channel of h by a factor that keeps its outliers within FP8's range and divides the
next weight's column by it: `smooth` is that factor, a constant to backward.

Float32 inside; h is rounded once, to the dtype of gate, as by a gated MLP that returns it, and only
then cast: the bytes are those of the rounded h put through ``torch_fp8::quantize_2d``.

Every operator is opaque to torch.compile, plain torch on the CPU and a Triton kernel on CUDA. The
two round the same values to the same bytes; exp differs in its last bits between a processor's
library and a card, so that now and then an h is the neighbouring BF16, and rarely its FP8 code too.

Legend: R rows (tokens), C columns (features). Inputs have any strides, results are contiguous.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.ops.fused_quantize import (
    CAST_ARGUMENTS,
    DELAYED_ARGUMENTS,
    DelayedCast,
    cast_result,
    no_amax,
    register,
    save_input,
)
from torch_fp8.ops.registry import operators
from torch_fp8.quantization.scaling import tensor_amax


def swiglu_save(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Save gate and up for backward, and compute the amax of h, in one read.

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
    """Compute ``silu(gate) * up``, times `smooth`: (R, C) of gate's dtype, rounded once.

    Args:
        gate, up, smooth: see `swiglu_save`.
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
    """Cast `swiglu` to FP8 in the layouts asked for, in one read (rowwise: unfused).

    Args:
        gate, up, smooth: see `swiglu_save`.
        amax: () float32 of `swiglu_save`, for tensorwise with current scaling.
        scale: () float32 dequantization scale, for tensorwise with delayed scaling.
        dtype: float8_e4m3fn or float8_e5m2.
        granularity: see `torch_fp8.quantization.recipe`.
        power_of_two: round scales up to powers of two.
        row, col: the layouts to make.
        save: whether to return gate and up as `swiglu_save` does, from the same read.
    Returns:
        ``(q, s, qt, st, gate_q, gate_s, up_q, up_s, amax)``, the first four as told in
        `torch_fp8.ops.fused_quantize`; amax () is that of h where `scale` was given, for its
        history, and empty otherwise.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    return operators.swiglu_quantize(
        gate, up, smooth, amax, scale, dtype, granularity, power_of_two, row, col, save
    )


def swiglu_quantize_delayed(
    gate: Tensor, up: Tensor, smooth: Tensor | None, how: DelayedCast, save: bool
) -> tuple[Tensor, ...]:
    """Cast as `swiglu_quantize`, with the tensorwise scale that a history suggests.

    Args:
        gate, up, smooth, save: see `swiglu_quantize`.
        how: the cast.
    Returns:
        ``(q, scale, qt, gate_q, gate_s, up_q, up_s, amax)``; scale () and the amax () of h float32.
    """
    return operators.swiglu_quantize_delayed(gate, up, smooth, *how, save)


def swiglu_reference(gate: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor:
    """Reference of `swiglu`."""
    g = gate.float()
    h = g * g.sigmoid() * up.float()
    return (h if smooth is None else h * smooth).to(gate.dtype).contiguous()


def swiglu_save_reference(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reference of `swiglu_save`."""
    amax = tensor_amax(swiglu_reference(gate, up, smooth))
    return (*save_input(gate, save), *save_input(up, save), amax)


def swiglu_quantize_reference(
    gate: Tensor, up: Tensor, smooth: Tensor | None, *how: Any
) -> tuple[Tensor, ...]:
    """Reference of `swiglu_quantize`."""
    (amax, scale, *cast), save = how[:-1], how[-1]
    h = swiglu_reference(gate, up, smooth)
    made = cast_result(h, amax, scale, *cast)
    saved = (*save_input(gate, save), *save_input(up, save))
    return (*made, *saved, no_amax(h) if scale is None else tensor_amax(h))


def swiglu_quantize_delayed_reference(
    gate: Tensor, up: Tensor, smooth: Tensor | None, *how: Any
) -> tuple[Tensor, ...]:
    """Reference of `swiglu_quantize_delayed`."""
    *cast, save = how
    q, scale, qt, amax = DelayedCast(*cast).reference(swiglu_reference(gate, up, smooth))
    return (q, scale, qt, *save_input(gate, save), *save_input(up, save), amax)


def _save_fake(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True
) -> tuple[Tensor, ...]:
    amax = gate.new_empty((), dtype=torch.float32)
    return (*save_input(gate, save), *save_input(up, save), amax)


def _swiglu_fake(gate: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape)


def _quantize_fake(
    gate: Tensor, up: Tensor, smooth: Tensor | None, *how: Any
) -> tuple[Tensor, ...]:
    (amax, scale, *cast), save = how[:-1], how[-1]
    taken = no_amax(gate) if scale is None else gate.new_empty((), dtype=torch.float32)
    saved = (*save_input(gate, save), *save_input(up, save))
    return (*cast_result(gate, amax, scale, *cast), *saved, taken)


def _delayed_fake(gate: Tensor, up: Tensor, smooth: Tensor | None, *how: Any) -> tuple[Tensor, ...]:
    *cast, save = how
    q, scale, qt, amax = DelayedCast(*cast).fake(gate)
    return (q, scale, qt, *save_input(gate, save), *save_input(up, save), amax)


def _kernels() -> Any:
    from torch_fp8.kernels import swiglu

    return swiglu


_FORWARD = "Tensor gate, Tensor up, Tensor? smooth"
_EIGHT, _NINE = (", ".join(["Tensor"] * n) for n in (8, 9))

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
        f"swiglu_quantize_delayed({_FORWARD}, {DELAYED_ARGUMENTS}, bool save) -> ({_EIGHT})",
        swiglu_quantize_delayed_reference,
        _delayed_fake,
    ),
):
    register(_schema, _reference, _fake, _kernels)
