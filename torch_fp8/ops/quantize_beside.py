"""A cast of a gradient and the transpose of a weight's payload, as one operator.

The backward of a layer needs both for dgrad. In a graph of torch.compile they are one launch; the
transpose depends on a tensor of backward, so that no graph computes it in forward.
"""

from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import LayoutsPlus, Payloads, QuantizedTensor, as_layouts, quantize_2d
from torch_fp8.ops.registry import operator
from torch_fp8.ops.transpose import transposed_bytes


@operator(lambda x, options, codes: (*options.new_layouts(x), codes.new_empty(codes.shape[::-1])))
def quantize_2d_beside(x: Tensor, options: CastOptions, payload: Tensor) -> LayoutsPlus:
    """Cast x (M, N) as `quantize_2d`, tensorwise, and transpose payload (N, K) to (K, N)."""
    layouts = quantize_2d.reference(x, options)
    return (*layouts, transposed_bytes.reference(payload, payload.shape[0]))


def quantize_beside(
    x: Tensor, options: CastOptions, payload: QuantizedTensor
) -> tuple[Payloads, QuantizedTensor]:
    """Return the payloads of x, and the transpose of `payload`.

    Args:
        x: (M, N) float32, bfloat16 or float16, any strides.
        options: tensorwise cast of x.
        payload: (N, K), tensorwise.
    """
    *layouts, qdata = quantize_2d_beside(x, options, payload.qdata)
    return as_layouts(layouts, options), payload._replace(qdata=qdata)
