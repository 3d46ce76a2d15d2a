"""`dgrad_operands`: the operands of dgrad in a graph of torch.compile, which casts in backward.

Legend: M tokens, K in, N out.
"""

import torch
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.ops.quantize_beside import quantize_beside
from torch_fp8.ops.side_by_side import side_by_side
from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.quantizer import Quantizer, WeightQuantizer, matrix, source_of
from torch_fp8.tensor.split_weight import SplitWeight


def dgrad_operands(
    quantizer: Quantizer,
    grad: Tensor,
    for_weight: WeightQuantizer,
    weight: Tensor,
    scale: Tensor | None,
    *,
    columnwise: bool,
    sum_dtype: torch.dtype | None,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None, QuantizedTensor]:
    """Cast the gradient of a layer's output, and make the weight's payload that dgrad reads.

    The weight's payload is made to depend on the gradient, so that no graph computes it in forward
    and keeps it. A payload that the weight keeps is transposed in the launch that casts the
    gradient.

    Args:
        quantizer, grad, columnwise, sum_dtype: cast of the gradient (..., N), see `Quantizer`.
        for_weight, weight, scale: see `WeightQuantizer.for_dgrad`.
    Returns:
        The gradient (M, N), its transpose (N, M), and the sums of its rows, as from `Quantizer`;
        the weight (K, N).
    """
    payload = None if for_weight.transposed else for_weight.kept_payload(weight)
    joins = source_of(grad) is None and not isinstance(grad, QuantizableTensor)
    joins = joins and quantizer.spec.granularity == "tensorwise" and sum_dtype is None
    if joins and payload is not None and not payload.scale.ndim:
        x = matrix(grad)
        options = quantizer.options(x, rowwise=True, columnwise=columnwise)
        (g, g_t), w = quantize_beside(x, options, payload)
        return g, g_t, None, w
    g, g_t, sums = quantizer(grad, rowwise=True, columnwise=columnwise, sum_dtype=sum_dtype)
    assert g is not None
    source = quantizer.source
    # A slot has fewer bytes than the payload, and the cast has written it, too.
    after = g.scale if source.scale is None else g.qdata if source.slot is None else source.slot
    # A partitioner saves parameters at no cost, but weighs the tensors of a subclass by bytes.
    if isinstance(weight, SplitWeight) and payload is None and scale is not None:
        high, spec = weight.halves.high, for_weight.quantizer.spec
        if not for_weight.transposed and not any(size % GEMM_ALIGNMENT for size in high.shape):
            return g, g_t, sums, side_by_side([high], spec, [scale], after)
    return g, g_t, sums, for_weight.for_dgrad(weight, scale, after)
