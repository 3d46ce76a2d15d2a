"""The gradient of a bias, ``g.sum(0)``, computed by the cast that reads the gradient g anyway.

``torch_fp8::quantize_2d_sum`` is ``torch_fp8::quantize_2d`` with additional sums over rows. On CUDA
each tile stores the sums of its 128 rows, a hundredth of the bytes of g, and one more launch adds
these in an order that depends only on the shape.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import Payloads, as_layouts, quantize_2d
from torch_fp8.ops.registry import emulates_casts, operator

Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]


def quantize_layouts_and_sum(
    x: Tensor, options: CastOptions, sum_dtype: torch.dtype
) -> tuple[Payloads, Tensor]:
    """Cast as `quantize_layouts`; also sum rows, (C,), rounded from float32 once."""
    *layouts, sums = quantize_2d_sum(x, options, sum_dtype)
    return as_layouts(layouts, options), sums


def quantize_2d_sum_cuda(x: Tensor, options: CastOptions, sum_dtype: torch.dtype) -> Outputs:
    """Run `quantize_2d_sum` on CUDA: launch its kernels."""
    if emulates_casts(x.device):
        return quantize_2d_sum.reference(x, options, sum_dtype)
    from torch_fp8.kernels import quantize
    from torch_fp8.kernels.column_sums import TileSums

    sums = TileSums()
    results = quantize.quantize_2d(x, options, sums)
    return (*results, sums.total(x, sum_dtype))


def _quantize_2d_sum_fake(x: Tensor, options: CastOptions, sum_dtype: torch.dtype) -> Outputs:
    return (*options.new_layouts(x), x.new_empty(x.shape[1], dtype=sum_dtype))


@operator(_quantize_2d_sum_fake, cuda=quantize_2d_sum_cuda)
def quantize_2d_sum(x: Tensor, options: CastOptions, sum_dtype: torch.dtype) -> Outputs:
    """Cast as `quantize_2d`, and sum the rows; the kernel adds in another order."""
    sums = x.sum(0, dtype=torch.float32).to(sum_dtype)
    return (*quantize_2d.reference(x, options), sums)
