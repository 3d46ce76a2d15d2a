"""Factors of an activation's channels that move into the next weight (Smooth-SwiGLU).

The idea is from arXiv 2409.12517 section 4.

With factors s (C,), powers of two, ``x w^T = (x s) (w / s)^T`` holds exactly, and the tensor that
is cast to FP8 is smoother. A channel whose largest magnitude is a gets
``s = 2^-floor(floor(log2 a) / 2)``, about ``a^-1/2``. This divides an outlier between activation
and weight, whose formats each cover 15 powers of two before they lose bits. ``s = 1 / a`` would
move it into the weight alone. The outlier of an aligned channel (200 times larger in gate and up,
40,000 times in the product) then takes up the weight's whole range: 16.6 dB are left of what the
other channels contribute, 28.5 dB with the root (benchmarks/results/smooth_factors.csv).

Legend: R rows (tokens), C columns (channels).
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import Payloads, as_layouts, quantize_2d, save_inputs
from torch_fp8.ops.registry import operator
from torch_fp8.ops.swiglu import swiglu
from torch_fp8.quantization.scaling import SMOOTH_RANGE

_BIAS, _MANTISSA = 127, 23


def _column_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float32)


@operator(_column_fake)
def column_amax(x: Tensor) -> Tensor:
    """Compute the largest magnitude of each column, (C,) float32; NaN if a column has a NaN.

    Args:
        x: (R, C) float32, bfloat16 or float16.
    """
    if not x.shape[0]:
        return x.new_zeros(x.shape[1], dtype=torch.float32)
    return x.abs().amax(0).float()


@operator(lambda gate, up, save: (*save_inputs(save, gate, up), _column_fake(gate)), results=5)
def swiglu_save_columns(gate: Tensor, up: Tensor, save: bool) -> tuple[Tensor | None, ...]:
    """Save gate and up as `torch_fp8.ops.swiglu.swiglu_save`, and compute the amax of each column.

    Args:
        gate, up: see `torch_fp8.ops.swiglu.swiglu`.
        save: whether to save gate and up; otherwise only the amaxes are computed.
    Returns:
        gate in E4M3 and its scale, the same of up, all None unless `save`; and the amaxes (C,)
        float32 of ``silu(gate) * up``. All come from one read.
    """
    amax = column_amax.reference(swiglu.reference(gate, up, None))
    return (*save_inputs(save, gate, up), amax)


@operator(lambda amax: (torch.empty_like(amax), torch.empty_like(amax), amax.new_empty(())))
def smooth_factors(amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``s = 2^-floor(floor(log2 amax) / 2)``, its reciprocal, and ``max(amax s)``.

    Channels smaller than the largest by more than `SMOOTH_RANGE` powers of two, including zero
    channels, get the factor of a channel that is smaller by exactly that. A channel that is not
    finite keeps its values.

    Args:
        amax: (C,) float32, one for each channel.
    Returns:
        s and 1 / s, (C,) float32; the amax () of the product with s.
    """
    exponent = (amax.view(torch.int32) >> _MANTISSA) - _BIAS
    is_finite = exponent <= _BIAS
    largest = torch.where(is_finite, exponent, -_BIAS).amax() if amax.numel() else exponent
    half = torch.maximum(exponent, largest - SMOOTH_RANGE) >> 1
    half = torch.where(is_finite, half, 0)
    s, inverse = (
        (_BIAS + e << _MANTISSA).to(torch.int32).view(torch.float32) for e in (-half, half)
    )
    smoothed = (amax * s).amax() if amax.numel() else amax.new_zeros(())
    return s, inverse, smoothed


@operator(lambda x, factors, options: options.new_layouts(x), results=4)
def quantize_columns(x: Tensor, factors: Tensor, options: CastOptions) -> tuple[Tensor | None, ...]:
    """Cast ``x * factors``, computed in float32, to FP8 in one read (rowwise: unfused).

    Args:
        x: (R, C) float32, bfloat16 or float16, of any strides.
        factors: (C,) float32.
        options: the cast; tensorwise with an amax or a scale of the result.
    Returns:
        ``(q, s, qt, st)``, see `torch_fp8.ops.quantize.quantize_2d`.
    """
    return quantize_2d((x.float() * factors).contiguous(), options)


def smoothed_layouts(x: Tensor, factors: Tensor, options: CastOptions) -> Payloads:
    """Cast as `quantize_columns`; returns the requested payloads."""
    return as_layouts(quantize_columns(x, factors, options), options)
