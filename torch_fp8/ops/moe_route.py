"""The way of tokens to their experts and back, as an order of rows: `moe_route`.

The rows of each expert are padded to a multiple of 16 in the map itself, so that one order of rows
serves every GEMM of a block, and no group is empty. A row of padding is zeros. How many rows there
are follows from shapes alone; the host waits for nothing.

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
    # (T, k) -> (T * k,), by expert; tokens of an expert stay in their order
    expert, order = top_k_index.reshape(-1).long().clamp(max=num_experts).sort(stable=True)
    ones = torch.ones_like(expert)
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
    return Route(slot, token, row.view(tokens, top_k), begin[1:].int())


def group_of_rows(offs: Tensor, num_rows: int) -> Tensor:
    """Return the group of each row, (R,) int64; E for the rows behind the last group."""
    rows = torch.arange(num_rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, rows, right=True)


def spread_rows(x: Tensor, token: Tensor) -> Tensor:
    """Return the tokens (T, K) of rows (R, K), zeros for rows of padding."""
    return F.pad(x, (0, 0, 0, 1))[token]
