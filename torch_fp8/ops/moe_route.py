"""The way of tokens to their experts and back: `moe_route`, `gather_rows`, `combine_rows`.

The rows of each expert are padded to a multiple of 16 in the map itself, so that one order of rows
serves every GEMM of a block, and no group is empty. A row of padding is zeros. How many rows there
are follows from shapes alone; the host waits for nothing.

Legend: T tokens, k experts of a token, E experts, R rows.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor, cast_saturating
from torch_fp8.quantization.formats import GEMM_ALIGNMENT, format_of
from torch_fp8.quantization.payload_shape import multiple_of_16
from torch_fp8.quantization.scaling import scale_from_amax


class Route(NamedTuple):
    """The order of the rows that experts compute.

    Attributes:
        slot: (R,) int64, the entry of the (T, k) router's choice that a row computes; T * k for a
            row of padding.
        token: (R,) int64, the token of a row; T for a row of padding.
        row: (T, k) int64, the row of each entry. The rows of entries that belong to no expert here
            lie behind the last group.
        offs: (E,) int32, the row behind the last one of each expert.
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
        num_experts: E.
    Returns:
        The order, with R = T * k rounded up to a multiple of 16, and 16 * E.
    """
    (tokens, top_k), device = top_k_index.shape, top_k_index.device
    num_slots = tokens * top_k
    expert, order = top_k_index.reshape(-1).long().clamp(max=num_experts).sort(stable=True)
    ones = torch.ones_like(expert)
    counts = ones.new_zeros(num_experts + 1).scatter_add_(0, expert, ones)
    padded = (-(counts[:-1] // -GEMM_ALIGNMENT) * GEMM_ALIGNMENT).clamp(min=GEMM_ALIGNMENT)
    begin, ends = F.pad(padded.cumsum(0), (1, 0)), counts.cumsum(0)  # (E + 1,)
    within = torch.arange(num_slots, device=device) - (ends - counts)[expert]
    position = begin[expert] + within
    row = torch.empty_like(order).scatter_(0, order, position)
    num_rows = multiple_of_16(num_slots) + GEMM_ALIGNMENT * num_experts
    of_expert = torch.where(expert < num_experts, order, num_slots)
    slot = order.new_full((num_rows,), num_slots).scatter_(0, position, of_expert)
    token = torch.div(slot, max(top_k, 1), rounding_mode="floor")
    return Route(slot, token, row.view(tokens, top_k), begin[1:].int())


def group_of_rows(offs: Tensor, num_rows: int) -> Tensor:
    """Return the group of each row, (R,) int64; E for the rows behind the last group."""
    rows = torch.arange(num_rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, rows, right=True)


def gather_rows(x: QuantizedTensor, token: Tensor) -> QuantizedTensor:
    """Return the payload and scales of the tokens of rows, zeros for rows of padding.

    Args:
        x: (T, K) with a scale (T, 1) for each token.
        token: see `Route`.
    """
    codes = F.pad(x.qdata.view(torch.uint8), (0, 0, 0, 1))[token]
    scale = F.pad(x.scale, (0, 0, 0, 1), value=1.0)[token]
    return x._replace(qdata=codes.view(x.qdata.dtype), scale=scale)


def spread_rows(x: Tensor, token: Tensor) -> Tensor:
    """Return the tokens (T, K) of rows (R, K), zeros for rows of padding."""
    return F.pad(x, (0, 0, 0, 1))[token]


def combine_rows(rows: Tensor, row: Tensor) -> Tensor:
    """Add up the rows (R, K) of each token in float32 and round once to their dtype, (T, K).

    Args:
        rows: (R, K).
        row: see `Route`.
    """
    return rows[row].sum(1, dtype=torch.float32).to(rows.dtype)


def transpose_groups(x: QuantizedTensor, offs: Tensor) -> QuantizedTensor:
    """Transpose the rows of each group, without a cast of their values in high precision.

    Scales are powers of two, so that a new one for each group and column shifts exponents, and
    loses only what falls below the least number of the format.

    Args:
        x: (R, K) with a scale (R, 1).
        offs: see `Route`.
    Returns:
        (K, R), with a scale (E, K) for each group.
    """
    format = format_of(x.qdata.dtype)
    values = x.qdata.float() * x.scale
    group = group_of_rows(offs, values.shape[0])[:, None].expand_as(values)
    amax = values.new_zeros(offs.shape[0] + 1, values.shape[1])
    amax = amax.scatter_reduce(0, group, values.abs(), "amax")
    scale = scale_from_amax(amax, format, power_of_two=True)
    codes = cast_saturating(values, scale.gather(0, group), format)
    return x._replace(qdata=codes.t().contiguous(), scale=scale[:-1].contiguous())
