"""The operands of a layer's fprop with scales per channel, as Smooth-SwiGLU has them.

The input is cast as ``x s``, the weight as ``w / s``, whose product is ``x w^T``; the factors s are
those of `torch_fp8.ops.smooth`. Both scales are those of the tensors at hand, with delayed scaling,
too: an outlier that comes unannounced is in s, which is known before anything is cast. Recorded are
the amaxes of x and w as they are, for dgrad, which takes the weight as it is, and for whoever goes
on without s. The gradient of the weight, ``g^T (x s)``, is divided by s at the end.

Legend: M tokens, K in, N out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import saves_nothing
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.ops.smooth import column_amax, smooth_factors, smoothed_layouts
from torch_fp8.quantization.scaling import group_amax, scale_from_amax
from torch_fp8.tensor.base import QuantizableTensor, dequantized, input_stand_ins
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor
from torch_fp8.tensor.quantizer import InputPayloads, Quantizer, Quantizers, matrix
from torch_fp8.tensor.split_weight import stored


class CastOperands(NamedTuple):
    """What fprop multiplies, and what backward needs of it.

    Attributes:
        input: with the payload that wgrad takes; smooth, of ``x s``.
        weight: (N, K); smooth, of ``w / s``.
        weight_scale: () of the weight as it is, for dgrad; None: its cast finds it.
        inverse: (K,) float32, 1 / s; None: the input is cast as it is.
    """

    input: InputPayloads
    weight: QuantizedTensor
    weight_scale: Tensor | None
    inverse: Tensor | None = None


def smooth_operands(
    quantizers: Quantizers,
    x: Tensor,
    weight: Tensor,
    *,
    wgrad: bool,
    fp8_wgrad: bool,
    dtype: torch.dtype,
) -> CastOperands:
    """Cast the operands of fprop, and the input for the wgrad that may follow.

    Args:
        x: (..., K).
        weight: (N, K), or (K, N) where its quantizer says so.
        wgrad, fp8_wgrad, dtype: see `torch_fp8.tensor.quantizer.quantize_input`.
    """
    of_input = quantizers.input
    source = x.production if isinstance(x, LazyQuantizedTensor) else None
    dense = None if source is not None else matrix(x)
    if source is not None:
        channels = source.channel_amax()
    else:
        assert dense is not None
        channels = column_amax(dense)
    factors, inverse, amax = smooth_factors(channels)
    if quantizers.channels is not None and not torch.compiler.is_compiling():
        quantizers.channels.amax = channels
    of_input.source.record(channels)
    dropped = wgrad and saves_nothing()
    options = _options(of_input, amax, rowwise=True, columnwise=fp8_wgrad and not dropped)
    if source is not None:
        row, col = source.smoothed(factors, options)
    else:
        assert dense is not None
        row, col = smoothed_layouts(dense, factors, options)
    assert row is not None
    if quantizers.observer is not None:
        quantizers.observer.input(x, row, col, factors)
    if dropped:
        payloads = InputPayloads(row, *input_stand_ins(row, fp8_wgrad, dtype), None)
    elif col is not None:
        payloads = InputPayloads(row, col.qdata, col.scale, None)
    else:
        payloads = InputPayloads(row, matrix(x).to(dtype) if wgrad else None, None, None)
    return CastOperands(payloads, *_smooth_weight(quantizers, weight, inverse), inverse)


def _smooth_weight(
    quantizers: Quantizers, weight: Tensor, inverse: Tensor
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return the payload of ``w / s``, and the scale of the weight as it is where it is known."""
    quantizer, scale, amax = quantizers.weight.quantizer, None, None
    whole = dequantized(stored(weight))  # FP8 if gathered, or stored so
    rows = whole.t() if quantizers.weight.transposed else whole
    rows = rows.detach()
    if quantizer.spec.granularity == "tensorwise":
        columns = column_amax(rows)
        amax = (columns * inverse).amax()
        if not isinstance(weight, QuantizableTensor):
            scale = _scale(quantizer, columns)
    row, _ = smoothed_layouts(
        rows, inverse, _options(quantizer, amax, rowwise=True, columnwise=False)
    )
    assert row is not None
    if quantizers.observer is not None:
        quantizers.observer.weight(weight, row, inverse)
    return row, scale


def _scale(quantizer: Quantizer, columns: Tensor) -> Tensor:
    """Return the () scale of a weight whose columns have these amaxes, and record the largest."""
    quantizer.source.record(columns)
    if quantizer.source.scale is not None:
        return quantizer.source.scale
    amax, spec = group_amax(columns, quantizer.group), quantizer.spec
    return scale_from_amax(amax, spec.format, spec.power_of_two)


def _options(
    quantizer: Quantizer, amax: Tensor | None, *, rowwise: bool, columnwise: bool
) -> CastOptions:
    """Return a cast with the scale of this very tensor, the same on all ranks of a group."""
    spec = quantizer.spec
    if spec.granularity != "tensorwise":
        amax = None
    elif quantizer.group is not None and amax is not None:
        amax = group_amax(amax, quantizer.group)
    return CastOptions.of(spec, None, amax, rowwise=rowwise, columnwise=columnwise)
