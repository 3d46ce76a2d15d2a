"""Messages on CUDA: the twin of `torch_fp8.ops.messages`, byte for byte.

Codes are unspecified in groups whose scale is NaN.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.messages_kernels import (
    pack_kernel,
    reduce_and_repack_kernel,
    sum_plain_kernel,
    unpack_kernel,
    unpack_sum_kernel,
)

Keys = tuple[int, int]

GROUPS, ODD_GROUPS = 64, 16
# Groups per tile: 16 values for each thread of four warps, in accesses of 16 bytes; 4 if values
# move one by one.
PLAIN = 1024
WARPS = 4
_COMPILE = {"num_warps": WARPS, "enable_fp_fusion": False}


def pack(values: Tensor, layout: Any, messages: Tensor, keys: Keys | None) -> None:
    """Encode the groups of a flat buffer into messages; see `ops.messages.pack_flat`."""
    if not layout.num_groups:
        return
    aligned, groups = _tile(values)
    with torch.cuda.device_of(messages):
        pack_kernel[(cdiv(layout.num_groups, groups), messages.shape[0])](
            values,
            messages,
            values.numel(),
            layout.num_groups,
            messages.stride(0),
            *(keys or (0, 0)),
            STOCHASTIC=keys is not None,
            ALIGNED=aligned,
            GROUPS=groups,
            **_COMPILE,
        )


def unpack(messages: Tensor, layout: Any, values: Tensor) -> None:
    """Decode the groups of messages into a flat buffer, which may end before the last group."""
    if not layout.num_groups or not values.numel():
        return
    aligned, groups = _tile(values)
    with torch.cuda.device_of(messages):
        unpack_kernel[(cdiv(layout.num_groups, groups), messages.shape[0])](
            messages,
            values,
            values.numel(),
            layout.num_groups,
            messages.stride(0),
            ALIGNED=aligned,
            GROUPS=groups,
            **_COMPILE,
        )


def unpack_sum(messages: Tensor, layout: Any, out: Tensor, scale: float) -> None:
    """Write the sum over the messages, times `scale`, into `out`."""
    if not layout.num_groups:
        return
    aligned, groups = _tile(out)
    with torch.cuda.device_of(messages):
        unpack_sum_kernel[(cdiv(layout.num_groups, groups),)](
            messages,
            out,
            messages.shape[0],
            layout.num_groups,
            messages.stride(0),
            float(scale),
            ALIGNED=aligned,
            GROUPS=groups,
            **_COMPILE,
        )


def reduce_and_repack(
    messages: Tensor,
    layout: Any,
    combined: Tensor,
    scale: float,
    keys: Keys | None,
) -> None:
    """Encode the sum over the messages, times `scale`, into the message `combined` (1, B)."""
    if not layout.num_groups:
        return
    with torch.cuda.device_of(messages):
        reduce_and_repack_kernel[(cdiv(layout.num_groups, GROUPS),)](
            messages,
            combined,
            messages.shape[0],
            layout.num_groups,
            messages.stride(0),
            float(scale),
            *(keys or (0, 0)),
            STOCHASTIC=keys is not None,
            GROUPS=GROUPS,
            **_COMPILE,
        )


def sum_plain(plain: Tensor, out: Tensor, scale: float) -> None:
    """Write the sum over the rows of `plain` (N, P) bfloat16, times `scale`, into `out` (P,)."""
    assert out.stride(0) == 1
    with torch.cuda.device_of(plain):
        sum_plain_kernel[(cdiv(out.numel(), PLAIN),)](
            plain,
            out,
            plain.shape[0],
            out.numel(),
            plain.stride(0),
            float(scale),
            BLOCK=PLAIN,
            **_COMPILE,
        )


def _tile(values: Tensor) -> tuple[bool, int]:
    """Return whether 16 values can be moved at once, and the groups of a tile."""
    aligned = values.numel() % 16 == 0 and values.data_ptr() % 16 == 0
    return aligned, GROUPS if aligned else ODD_GROUPS
