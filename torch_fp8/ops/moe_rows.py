"""Operators on rows of experts: gather FP8 tokens, transpose them, and sum results for each token.

Each function is an operator with a reference in plain torch, and Triton kernels on CUDA that
compute the same bits. Bytes read and written for an element of a row: `gather_payload` 1 and 1,
`transpose_payload` 2 and 1, `combine_rows` those of its dtype, and a k-th of them.

Legend: T tokens, k experts of a token, R rows of all experts, E experts, K columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.ops.moe_route import group_of_rows
from torch_fp8.ops.quantize import QuantizedTensor, cast_saturating
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.scaling import scale_from_amax


def gather_rows(x: QuantizedTensor, token: Tensor) -> QuantizedTensor:
    """Return the payload and scales of the rows' tokens, zeros for padding.

    Args:
        x: (T, K) with a scale (T, 1) for each token.
        token: see `torch_fp8.ops.moe_route.Route`.
    """
    qdata, scale = gather_payload(x.qdata, x.scale, token)
    return x._replace(qdata=qdata, scale=scale)


def transpose_groups(
    x: QuantizedTensor, offs: Tensor, token: Tensor | None = None
) -> QuantizedTensor:
    """Transpose the rows of each group without a second cast from high precision.

    Scales are powers of two, so a new one for each group and column only shifts exponents. Values
    below the format's smallest number are lost.

    Args:
        x: (R, K) with a scale (R, 1); (T, K) with (T, 1) if `token` is given.
        offs: the ends of the groups, see `torch_fp8.ops.moe_route.Route`; multiples of 16 on CUDA.
        token: the tokens of the rows, gathered in the same pass; None: x consists of rows.
    Returns:
        (K, R) with a scale (E, K), one for each group; zeros after the last group.
    """
    qdata, scale = transpose_payload(x.qdata, x.scale, offs, token)
    return x._replace(qdata=qdata, scale=scale)


def _gather_fake(qdata: Tensor, scale: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    rows = token.shape[0]
    return qdata.new_empty((rows, qdata.shape[1])), scale.new_empty((rows, 1))


@operator(_gather_fake)
def gather_payload(qdata: Tensor, scale: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The operator ``torch_fp8::gather_payload``; see `gather_rows`.

    Args:
        qdata: (T, K) FP8, contiguous.
        scale: (T, 1) float32.
        token: (R,) int64, T for a row of padding.
    Returns:
        (R, K) FP8 and (R, 1) float32; padding rows have zeros and scale 1.
    """
    codes = F.pad(qdata.view(torch.uint8), (0, 0, 0, 1))[token]  # (T + 1, K) -> (R, K)
    # (R, K) and (R, 1)
    return codes.view(qdata.dtype), F.pad(scale, (0, 0, 0, 1), value=1.0)[token]


def _transpose_fake(
    qdata: Tensor, scale: Tensor, offs: Tensor, token: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, cols = qdata.shape
    rows = rows if token is None else token.shape[0]
    return qdata.new_empty((cols, rows)), scale.new_empty((offs.shape[0], cols))


@operator(_transpose_fake)
def transpose_payload(
    qdata: Tensor, scale: Tensor, offs: Tensor, token: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The operator ``torch_fp8::transpose_payload``; see `transpose_groups`.

    Args:
        qdata: (R, K) or (T, K) E4M3, contiguous.
        scale: (R, 1) or (T, 1) float32.
        offs: (E,) int32.
        token: (R,) int64, or None.
    Returns:
        (K, R) E4M3 and (E, K) float32.
    """
    if token is not None:
        qdata, scale = gather_payload.reference(qdata, scale, token)
    format, num_groups = format_of(qdata.dtype), offs.shape[0]
    group = group_of_rows(offs, qdata.shape[0])[:, None]  # (R, 1)
    values = (qdata.float() * scale).masked_fill_(group == num_groups, 0)
    group = group.expand_as(values)
    amax = values.new_zeros(num_groups + 1, values.shape[1])  # the last one for the rest
    amax = amax.scatter_reduce(0, group, values.abs(), "amax")
    scales = scale_from_amax(amax, format, power_of_two=True)
    codes = cast_saturating(values, scales.gather(0, group), format)  # (R, K)
    return codes.t().contiguous(), scales[:-1].contiguous()  # (K, R) and (E, K)


def _combine_fake(rows: Tensor, row: Tensor) -> Tensor:
    return rows.new_empty((row.shape[0], rows.shape[1]))


@operator(_combine_fake)
def combine_rows(rows: Tensor, row: Tensor) -> Tensor:
    """The operator ``torch_fp8::combine_rows``: sum the rows of each token.

    Args:
        rows: (R, K) float32, bfloat16 or float16, contiguous.
        row: (T, k) int64, the rows of each token; see `torch_fp8.ops.moe_route.Route`.
    Returns:
        (T, K) in the dtype of `rows`: a float32 sum in the order of `row`, rounded once.
    """
    if not row.shape[1]:
        return rows.new_zeros(row.shape[0], rows.shape[1])
    total = rows[row[:, 0]].float()  # (T, K)
    for entry in row.unbind(1)[1:]:
        total = total + rows[entry].float()
    return total.to(rows.dtype)
