"""The BF16 half of a `SplitWeight` for layers, and the dtype of its gradient."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.autograd.function import is_returned
from torch_fp8.tensor.split_weight import SplitWeight

_BESIDE = "_fp8_averaged_beside"


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: SplitWeight) -> Tensor:
        ctx.dtype = gradient_dtype(weight)
        return weight.halves.high.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(torch.float32 if is_returned(ctx, 0) else ctx.dtype)


@torch.compiler.allow_in_graph
def half(weight: Tensor) -> Tensor:
    """Return the BF16 half of a `SplitWeight`; the weight's gradient flows through it in BF16."""
    return _Half.apply(weight)


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a layer computes its weight's gradient for this forward.

    For a `SplitWeight` it is BF16, or float32 if DistributedDataParallel averages the gradient,
    because its buckets have the Parameter's dtype. A checkpoint with ``use_reentrant=True`` repeats
    the forward in backward, where torch does not say whose forward it is.
    """
    if not isinstance(weight, SplitWeight):
        return weight.dtype
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is None and (torch.compiler.is_compiling() or not _repeats_among_ranks()):
        return torch.bfloat16
    beside = getattr(weight, _BESIDE, None)
    if beside is None:
        return torch.float32
    return torch.bfloat16 if ddp is None or beside() is ddp else torch.float32


def _repeats_among_ranks() -> bool:
    """Return whether a backward repeats a forward, in a process that is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and torch._C._current_graph_task_id() != -1


def average_beside(weight: Tensor, ddp: DistributedDataParallel) -> None:
    """Note that `ddp` does not average the gradient of this weight, which may be BF16 then."""
    vars(weight)[_BESIDE] = weakref.ref(ddp)
