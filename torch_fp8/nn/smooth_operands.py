"""The operands of a layer's fprop with one scale per channel, for Smooth-SwiGLU.

`SmoothOperands` casts the input as ``x s`` and the weight as ``w / s``, so that the product is
``x w^T``. The factors s come from `torch_fp8.ops.smooth`. Both casts use the scales of the current
tensors, even with delayed scaling: s already contains a sudden outlier before anything is cast. The
recorded amaxes are those of x and w without s, for dgrad, which multiplies by w, and for later
steps without Smooth-SwiGLU. The gradient of the weight, ``g^T (x s)``, is divided by s at the end.

Legend: M tokens, K in, N out.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import saves_nothing
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.nn.layer_norm import Computed
from torch_fp8.nn.linear_function import CastOperands, PlainOperands
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.ops.smooth import column_amax, smooth_factors, smoothed_layouts, swiglu_save_columns
from torch_fp8.quantization.scaling import group_amax, scale_from_amax
from torch_fp8.tensor.base import QuantizableTensor, dequantized, input_stand_ins
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor
from torch_fp8.tensor.producer import LazySource
from torch_fp8.tensor.quantizer import InputPayloads, Quantizer, Quantizers, matrix
from torch_fp8.tensor.split_weight import stored


class SmoothOperands(PlainOperands):
    """Casts ``x s`` and ``w / s`` with factors s from the channels of x."""

    independent = False
    save_swiglu = staticmethod(swiglu_save_columns)

    @staticmethod
    def cast(
        quantizers: Quantizers, x: Tensor, weight: Tensor, training: bool | None, **needs: Any
    ) -> CastOperands:
        """Cast the operands of fprop, and the input for the wgrad that may follow.

        `training` is not used: ``w / s`` changes with each input, so it is never cached.
        """
        of_input = quantizers.input
        wgrad, fp8_wgrad, dtype = needs["wgrad"], needs["fp8_wgrad"], needs["dtype"]
        if isinstance(x, LazyQuantizedTensor):
            source = x.production
        else:
            source = LazySource("", (), Computed(matrix(x)))
        channels = source.channel_amax()
        factors, inverse, amax = smooth_factors(channels)
        if quantizers.channels is not None and not torch.compiler.is_compiling():
            quantizers.channels.amax = channels
        of_input.source.record(channels)
        dropped = wgrad and saves_nothing()
        options = _options(of_input, amax, rowwise=True, columnwise=fp8_wgrad and not dropped)
        row, col = source.smoothed(factors, options)
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
    """Return the payload (N, K) of ``w / s``, and the scale of w itself if it is known, or None."""
    quantizer, scale, amax = quantizers.weight.quantizer, None, None
    whole = dequantized(stored(weight))  # a weight gathered or stored in FP8 is dequantized
    rows = whole.t() if quantizers.weight.transposed else whole  # (N, K)
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
    """Return the () scale of a weight from its columns' amaxes (K,), and record the largest."""
    quantizer.source.record(columns)
    if quantizer.source.scale is not None:
        return quantizer.source.scale
    amax, spec = group_amax(columns, quantizer.group), quantizer.spec
    return scale_from_amax(amax, spec.format, spec.power_of_two)


def _options(
    quantizer: Quantizer, amax: Tensor | None, *, rowwise: bool, columnwise: bool
) -> CastOptions:
    """Return a cast with the scale of the current tensor, equal on all ranks of a group."""
    spec = quantizer.spec
    if spec.granularity != "tensorwise":
        amax = None
    elif quantizer.group is not None and amax is not None:
        amax = group_amax(amax, quantizer.group)
    return CastOptions.of(spec, None, amax, rowwise=rowwise, columnwise=columnwise)
