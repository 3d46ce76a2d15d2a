"""Operators on rows of experts: gather FP8 tokens, transpose them, and sum results for each token.

Each function is an operator with a reference in plain torch, and Triton kernels on CUDA that
compute the same bits. Bytes read and written for an element of a row: `gather_payload` 1 and 1,
`transpose_payload` 2 and 1, `combine_rows` those of its dtype, and a k-th of them.

Legend: T tokens, k experts of a token, R rows of all experts, E experts, K columns.

The order itself pads the rows of each expert to a multiple of 16, so one order serves every GEMM of
a block, and no group is empty. Padding rows are zeros. The number of rows follows from shapes
alone, so the host does not wait for the device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import (
    QuantizedTensor,
    cast_saturating,
    dequantize,
    quantize_layouts,
)
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.formats import GEMM_ALIGNMENT, format_of
from torch_fp8.quantization.payload_shape import multiple_of_16
from torch_fp8.quantization.scaling import scale_from_amax


class Route(NamedTuple):
    """The order of the rows that experts compute.

    Attributes:
        slot: (R,) int64, the entry in the router's choice (T, k) that a row computes; T * k for
            padding.
        token: (R,) int64, the token of a row; T for padding.
        row: (T, k) int64, the row of each entry. Entries without an expert on this rank have rows
            after the last group.
        offs: (E,) int32, the end (exclusive) of each expert's rows.
    """

    slot: Tensor
    token: Tensor
    row: Tensor
    offs: Tensor


@torch.no_grad()
def moe_route(top_k_index: Tensor, num_experts: int) -> Route:
    """Sort the entries of a router's choice by expert.

    Args:
        top_k_index: (T, k) integers; `num_experts` and above: no expert of this rank.
        num_experts: the number of experts of this rank, E.
    Returns:
        The order, with R = 16 * E + T * k rounded up to a multiple of 16.
    """
    (tokens, top_k), device = top_k_index.shape, top_k_index.device
    num_slots = tokens * top_k
    # (T, k) -> (T * k,), by expert; tokens of an expert stay in their order
    expert, order = top_k_index.reshape(-1).long().clamp(max=num_experts).sort(stable=True)
    ones = torch.ones_like(expert)
    # (E + 1,), last: no expert here
    counts = ones.new_zeros(num_experts + 1).scatter_add_(0, expert, ones)
    padded = (-(counts[:-1] // -GEMM_ALIGNMENT) * GEMM_ALIGNMENT).clamp(min=GEMM_ALIGNMENT)
    begin, ends = F.pad(padded.cumsum(0), (1, 0)), counts.cumsum(0)  # (E + 1,)
    within = torch.arange(num_slots, device=device) - (ends - counts)[expert]
    position = begin[expert] + within
    row = torch.empty_like(order).scatter_(0, order, position)  # (T * k,): where each entry lies
    num_rows = multiple_of_16(num_slots) + GEMM_ALIGNMENT * num_experts
    of_expert = torch.where(expert < num_experts, order, num_slots)
    # (R,): the entry of each row, T * k for padding
    slot = order.new_full((num_rows,), num_slots).scatter_(0, position, of_expert)
    token = torch.div(slot, max(top_k, 1), rounding_mode="floor")
    return Route(slot, token, row.view(tokens, top_k), begin[1:].int())  # row: (T * k,) -> (T, k)


def group_of_rows(offs: Tensor, num_rows: int) -> Tensor:
    """Return the group of each row, (R,) int64; E for the rows after the last group."""
    rows = torch.arange(num_rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, rows, right=True)


def spread_rows(x: Tensor, token: Tensor) -> Tensor:
    """Return the tokens (T, K) as rows (R, K), zeros for padding."""
    return F.pad(x, (0, 0, 0, 1))[token]  # (T, K) -> (T + 1, K), zeros last -> (R, K)


def gather_rows(x: QuantizedTensor, token: Tensor) -> QuantizedTensor:
    """Return the payload and scales of the rows' tokens, zeros for padding.

    Args:
        x: (T, K) with a scale (T, 1) for each token.
        token: see `torch_fp8.ops.moe_rows.Route`.
    """
    return QuantizedTensor(*gather_payload(x.qdata, x.scale, token), x.granularity)


def transpose_groups(
    x: QuantizedTensor, offs: Tensor, token: Tensor | None = None, after: Tensor | None = None
) -> QuantizedTensor:
    """Transpose the rows of each group without a second cast from high precision.

    Scales are powers of two, so a new one for each group and column only shifts exponents. Values
    below the format's smallest number are lost.

    Args:
        x: (R, K) with a scale (R, 1); (T, K) with (T, 1) if `token` is given.
        offs: the ends of the groups, see `torch_fp8.ops.moe_rows.Route`; multiples of 16 on CUDA.
        token: the tokens of the rows, gathered in the same pass, or None if x consists of rows.
        after: see `CastOptions`; only without `token`.
    Returns:
        (K, R) with a scale (E, K), one for each group; zeros after the last group.
    """
    return QuantizedTensor(*transpose_payload(x.qdata, x.scale, offs, token, after), x.granularity)


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
    qdata: Tensor, scale: Tensor, offs: Tensor, token: Tensor | None, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, cols = qdata.shape
    rows = rows if token is None else token.shape[0]
    return qdata.new_empty((cols, rows)), scale.new_empty((offs.shape[0], cols))


@operator(_transpose_fake)
def transpose_payload(
    qdata: Tensor, scale: Tensor, offs: Tensor, token: Tensor | None, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The operator ``torch_fp8::transpose_payload``; see `transpose_groups`.

    Args:
        qdata: (R, K) or (T, K) E4M3, contiguous.
        scale: (R, 1) or (T, 1) float32.
        offs: (E,) int32.
        token: (R,) int64, or None.
        after: a tensor or None, not read.
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


@operator(lambda rows, row: rows.new_empty((row.shape[0], rows.shape[1])))
def combine_rows(rows: Tensor, row: Tensor) -> Tensor:
    """The operator ``torch_fp8::combine_rows``: sum the rows of each token.

    Args:
        rows: (R, K) float32, bfloat16 or float16, contiguous.
        row: (T, k) int64, the rows of each token; see `torch_fp8.ops.moe_rows.Route`.
    Returns:
        (T, K) in the dtype of `rows`: a float32 sum in the order of `row`, rounded once.
    """
    if not row.shape[1]:
        return rows.new_zeros(row.shape[0], rows.shape[1])
    total = rows[row[:, 0]].float()  # (T, K)
    for entry in row.unbind(1)[1:]:
        total = total + rows[entry].float()
    return total.to(rows.dtype)


def _transpose_experts_fake(
    qdata: Tensor, scale: Tensor, options: CastOptions
) -> tuple[Tensor, Tensor]:
    experts, rows, cols = qdata.shape
    return qdata.new_empty(experts, cols, rows), scale.new_empty(experts, cols, 1)


@operator(_transpose_experts_fake, opaque=True)
def transpose_experts(qdata: Tensor, scale: Tensor, options: CastOptions) -> tuple[Tensor, Tensor]:
    """The operator ``torch_fp8::transpose_experts``: one node of a graph, however many experts.

    Args:
        qdata: (E, R, C) FP8.
        scale: (E, R, 1) float32.
        options: the rowwise cast of the transposes.
    Returns:
        (E, C, R) FP8 and (E, C, 1) float32.
    """
    turned, scales = _transpose_experts_fake(qdata, scale, options)
    for i in range(len(qdata)):  # only one expert at a time in float32
        values = dequantize(QuantizedTensor(qdata[i], scale[i], "rowwise"))
        of_one, _ = quantize_layouts(values.t(), options)  # (C, R) with a scale (C, 1)
        assert of_one is not None
        turned[i].view(torch.uint8).copy_(of_one.qdata.view(torch.uint8))
        scales[i] = of_one.scale
    return turned, scales
