"""Forwards without gradients of a layer whose weight is already cast (`tensor.payload_cache`).

For one token, deciding in Python how to multiply takes most of the time. So `repeated` reuses the
decisions of the forward that cached the weight's payload. `served_in_graph` is the forward in a
graph of torch.compile.

Legend: M tokens, K in, N out.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import autocast_dtype, output_dtype
from torch_fp8.autograd.function import only_shape_matters, reshaped, shape_of_result
from torch_fp8.nn.linear_function import graph_options
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.ops.registry import is_watched
from torch_fp8.ops.scaled_mm import cast, lay_out, multiply_laid_out, scaled_matmul
from torch_fp8.quantization.formats import CAST_DTYPES
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor


def repeated(layer: Any, input: Tensor) -> Tensor | None:
    """Run the forward of a `torch_fp8.nn.linear.Float8Layer` without gradients.

    Returns:
        The output (..., N), or None if something has changed, and a full forward has to run.
    """
    fp8 = layer.fp8
    cache, weight = fp8.payloads, layer._parameters.get("weight")
    if weight is None or cache.payload is None or fp8.emulate:
        return None
    if layer.training or not cache.is_current(weight):
        return None
    if type(input) is LazyQuantizedTensor:
        shape, dtype = input.outer_shape, input.outer_dtype
    elif type(input) is Tensor and not is_watched(input):
        shape, dtype = input.shape, input.dtype
    else:
        return None
    if not shape or shape[-1] != cache.columns or dtype not in CAST_DTYPES:
        return None
    if cache.quantizer is None:
        if fp8.observer is not None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            cache.quantizer = fp8.quantizers(layer).input
    if type(input) is LazyQuantizedTensor:
        a = input.production.rowwise(cache.quantizer)
    else:
        a, _, _ = cache.quantizer(input, rowwise=True, columnwise=False)
    if is_watched(a.qdata) or not a.qdata.numel():
        return None
    if cache.operand is None:
        cache.operand = lay_out(cache.payload, cache.columns)
    out_dtype = autocast_dtype(cache.device_type) or dtype
    bias = layer._parameters["bias"] if layer.fp8_adds_bias else None
    bias = bias if bias is None else cast(bias, out_dtype)
    y = multiply_laid_out(a, cache.operand, out_dtype, fp8.recipe.fprop.fast_accum, bias)
    whole = (*shape[:-1], y.shape[1])  # y (M, N)
    # Like `reshaped`, but faster: (M, N) -> (..., N), and not a view.
    return y.resize_(whole) if y.is_contiguous() else reshaped(y, whole)


@torch.compiler.allow_in_graph
def served_in_graph(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    granularity: Any,
    bias: Tensor | None,
    text: str,
    *buffers: Tensor,
) -> Tensor:
    """Run `linear_in_graph` without gradients, with a weight that is already cast.

    Args:
        qdata, scale, granularity: payload (N, K) of the weight.
        text: `LayerFP8.casts`.
        x, bias, buffers: arguments of `linear_in_graph`.
    """
    out_dtype = output_dtype(x)
    if only_shape_matters(x):
        return shape_of_result((*x.shape[:-1], qdata.shape[0]), out_dtype, x)
    options = graph_options(text, x.dtype, out_dtype, False)
    a, _, _ = options.quantizers_of(buffers).input(x, rowwise=True, columnwise=False)
    assert a is not None
    b, fast_accum = QuantizedTensor(qdata, scale, granularity), options.recipe.fprop.fast_accum
    y = scaled_matmul(a, b, out_dtype, bias=bias, fast_accum=fast_accum, emulate=options.emulate)
    return y.reshape(*x.shape[:-1], y.shape[-1])  # (M, N) -> (..., N)
