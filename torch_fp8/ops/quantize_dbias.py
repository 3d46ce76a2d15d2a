"""The gradient of a bias, ``g.sum(0)``, made by the cast that reads the gradient g anyway.

``torch_fp8::quantize_2d_sum`` is ``torch_fp8::quantize_2d`` with sums over rows besides. On CUDA
each tile stores the sums of its 128 rows, a hundredth of the bytes of g, and one more launch adds
these up, in an order that the shape alone decides.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.ops.quantize import (
    QuantizedTensor,
    as_layouts,
    as_outputs,
    emulates_casts,
    laid_out,
    quantize_2d_fake,
    quantize_2d_reference,
)
from torch_fp8.ops.registry import define, operators
from torch_fp8.quantization.recipe import CastSpec

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def quantize_layouts_and_sum(
    x: Tensor,
    spec: CastSpec,
    scale: Tensor | None = None,
    *,
    row: bool,
    col: bool,
    sum_dtype: torch.dtype,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor]:
    """Cast as `quantize_layouts`, and return (C,) ``x.sum(0)``, in float32, rounded once to
    `sum_dtype`.
    """
    *made, sums = operators.quantize_2d_sum(
        x, scale, spec.format.dtype, spec.granularity, spec.power_of_two, row, col, sum_dtype
    )
    return (*as_layouts(made, spec, scale, row, col), sums)


def quantize_2d_sum_reference(x: Tensor, *how: Any) -> Outputs:
    """Reference of ``torch_fp8::quantize_2d_sum``: `quantize_2d_reference`, and ``x.sum(0)``.

    The kernel adds in another order.

    Args:
        how: arguments of `quantize_2d_reference` but the amax, and last the dtype of the sums.
    """
    *cast, sum_dtype = how
    return (*quantize_2d_reference(x, *cast), x.sum(0, dtype=torch.float32).to(sum_dtype))


def _quantize_2d_sum_cpu(x: Tensor, *how: Any) -> Outputs:
    granularity = how[2]
    *made, sums = quantize_2d_sum_reference(x, *how)
    return (*laid_out(made, granularity), sums)


def _quantize_2d_sum_cuda(x: Tensor, *how: Any) -> Outputs:
    if emulates_casts(x.device):
        return _quantize_2d_sum_cpu(x, *how)
    from torch_fp8.kernels.column_sums import TileSums
    from torch_fp8.kernels.quantize import quantize_2d

    scale, dtype, granularity, power_of_two, row, col, sum_dtype = how
    sums = TileSums()
    made = quantize_2d(x, scale, dtype, granularity, power_of_two, row, col, sums=sums)
    return (*as_outputs(x, made, scale, dtype, granularity), sums.total(x, sum_dtype))


def _quantize_2d_sum_fake(x: Tensor, *how: Any) -> Outputs:
    *cast, sum_dtype = how
    return (*quantize_2d_fake(x, *cast), x.new_empty(x.shape[1], dtype=sum_dtype))


define(
    "quantize_2d_sum(Tensor x, Tensor? scale, ScalarType dtype, str granularity, "
    "bool power_of_two, bool row, bool col, ScalarType sum_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_2d_sum_cpu,
    _quantize_2d_sum_cuda,
    _quantize_2d_sum_fake,
)
