"""`RepeatedForward`: what a layer does in a forward without gradients that it has done before.

A token of generation is little work for the device, and what Python takes to find out how a layer
multiplies is most of its time. Where the weight is kept in FP8 (`torch_fp8.tensor.payload_cache`),
all that has been decided already; what is left is to cast the input and to multiply.
"""

import torch
from torch import Tensor, nn

from torch_fp8.autograd.function import reshaped
from torch_fp8.nn.layer_quantizers import LayerQuantizers
from torch_fp8.ops.registry import is_watched
from torch_fp8.ops.scaled_mm import cast, lay_out, multiply_laid_out
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor
from torch_fp8.tensor.quantizer import autocast_dtype

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class RepeatedForward(LayerQuantizers):
    """The part of a linear layer that repeats forwards without gradients."""

    bias: nn.Parameter | None
    fp8_emulate: bool
    fp8_adds_bias: bool

    def repeated(self, input: Tensor) -> Tensor | None:
        """Return the output, or None where the layer has to look at everything anew."""
        cache, weight = self.fp8_payloads, self._parameters["weight"]
        if cache is None or cache.payload is None or weight is None or self.fp8_emulate:
            return None
        if self.training or not cache.is_current(weight):
            return None
        if type(input) is LazyQuantizedTensor:
            shape, dtype = input.outer_shape, input.outer_dtype
        elif type(input) is Tensor and not is_watched(input):
            shape, dtype = input.shape, input.dtype
        else:
            return None
        if shape[-1] != cache.columns or dtype not in FLOATS:
            return None
        if cache.quantizer is None:
            if self.fp8_observer is not None:
                return None
            with torch.inference_mode(False), torch.no_grad():
                cache.quantizer = self.quantizers().input
        if type(input) is LazyQuantizedTensor:
            a = input.production.rowwise(cache.quantizer)
        else:
            a, _, _ = cache.quantizer(input, rowwise=True, columnwise=False)
        if is_watched(a.qdata) or not a.qdata.numel():
            return None
        if cache.operand is None:
            cache.operand = lay_out(cache.payload, cache.columns)
        out_dtype = autocast_dtype(cache.device_type) or dtype
        bias = self._parameters["bias"] if self.fp8_adds_bias else None
        bias = bias if bias is None else cast(bias, out_dtype)
        y = multiply_laid_out(a, cache.operand, out_dtype, self.fp8_recipe.fprop.fast_accum, bias)
        whole = (*shape[:-1], y.shape[1])
        # As `reshaped` does, in less time: the result is no view.
        return y.resize_(whole) if y.is_contiguous() else reshaped(y, whole)
