"""The order of rows in which experts compute tokens: `moe_route`.

The order itself pads the rows of each expert to a multiple of 16, so one order serves every GEMM of
a block, and no group is empty. Padding rows are zeros. The number of rows follows from shapes
alone, so the host does not wait for the device.

Legend: T tokens, k experts of a token, E experts, R rows.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.quantization.payload_shape import multiple_of_16


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
