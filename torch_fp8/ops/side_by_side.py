"""Matrices that one product multiplies by, cast into one payload, each at its place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import (
    QuantizedTensor,
    cast_saturating,
    quantize_2d,
    quantize_layouts,
)
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.payload_shape import Layouts, new_scale
from torch_fp8.quantization.recipe import CastSpec

MOST = 3
"""The maximum number of weights that the operator takes."""


def _fake(
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    scale_a: Tensor,
    scale_b: Tensor | None,
    scale_c: Tensor | None,
    dtype: torch.dtype,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = sum(x.shape[0] for x in (a, b, c) if x is not None)
    return a.new_empty((a.shape[1], rows), dtype=dtype), new_scale(a)


@operator(_fake)
def cast_side_by_side(
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    scale_a: Tensor,
    scale_b: Tensor | None,
    scale_c: Tensor | None,
    dtype: torch.dtype,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Cast up to three matrices (N, K) with the largest of their scales, and transpose them.

    Args:
        a, b, c: matrices in float32, bfloat16 or float16; b and c may be None.
        scale_a, scale_b, scale_c: () float32 dequantization scale of each.
        dtype: dtype of the payload.
        after: see `torch_fp8.ops.transpose.transposed_bytes`.
    Returns:
        The payload (K, N1 + N2 + ...), contiguous, and its scale.
    """
    scale = torch.stack([s for s in (scale_a, scale_b, scale_c) if s is not None]).amax()
    weights = [x.float() for x in (a, b, c) if x is not None]
    codes = cast_saturating(torch.cat(weights), scale, format_of(dtype))
    return codes.t().contiguous(), scale


def _joined_fake(a: Tensor, b: Tensor | None, c: Tensor | None, options: CastOptions) -> Layouts:
    return options.new_layouts(a, sum(x.shape[1] for x in (a, b, c) if x is not None))


@operator(_joined_fake)
def quantize_joined(a: Tensor, b: Tensor | None, c: Tensor | None, options: CastOptions) -> Layouts:
    """Cast up to three matrices (R, C) side by side, without joining them in memory first.

    Returns:
        `torch_fp8.ops.quantize.quantize_2d` of (R, C1 + C2 + ...).
    """
    return quantize_2d.reference(torch.cat([x for x in (a, b, c) if x is not None], 1), options)


def side_by_side(
    weights: Sequence[Tensor], spec: CastSpec, scales: Sequence[Tensor], after: Tensor
) -> QuantizedTensor:
    """Return weights (N, K) as one payload (K, N1 + N2 + ...), quantized along N.

    Args:
        weights: one weight or more.
        spec: format; tensorwise.
        scales: () scale of each weight in fprop. The largest serves all.
        after: see `torch_fp8.ops.transpose.transposed_bytes`.
    """
    if len(weights) <= MOST:
        more = [None] * (MOST - len(weights))
        arguments: Any = *weights, *more, *scales, *more, spec.format.dtype, after
        codes, scale = cast_side_by_side(*arguments)
        return QuantizedTensor(codes, scale, spec.granularity)
    scale = torch.stack(list(scales)).amax()
    options = CastOptions.of(spec, scale, after=after, rowwise=False, columnwise=True)
    parts = []
    for weight in weights:
        _, part = quantize_layouts(weight, options)
        assert part is not None
        parts.append(part.qdata.view(torch.uint8))
    codes = torch.cat(parts, 1).view(spec.format.dtype)
    return QuantizedTensor(codes, scale, spec.granularity)
