"""Uneven inputs under DistributedDataParallel, for the gradients that are averaged beside it.

In ``ddp.join()`` a rank that has run out of inputs takes part in the other ranks' collectives with
zeros, until all ranks have. DDP does this for the gradients that it averages; this module does it
for the 8-bit gradients of O3. At the end DDP gives all ranks the weights of the rank that joined
last; this module also sends that rank's residuals and the weights that DDP ignores. (Moments and
step counts remain each rank's own, as in stock training.)
"""

import hashlib
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.distributed.ddp.fp8_grad_reducer import Float8GradReducer
from torch_fp8.optim.converted import ConvertedOptimizer
from torch_fp8.optim.residual import settled_residual
from torch_fp8.tensor.halves import VERSIONS
from torch_fp8.tensor.split_weight import SplitWeight


class Join(JoinHook):
    """The hook of a rank that has joined: DDP's part, and ours."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        of_ddp: JoinHook,
        reducer: Float8GradReducer | None,
        optimizers: list[ConvertedOptimizer],
    ) -> None:
        self._ddp, self._of_ddp = ddp, of_ddp
        self._reducer, self._optimizers = reducer, optimizers

    def main_hook(self) -> None:
        """Take part in one step of the other ranks."""
        reducer = self._reducer
        if reducer is not None:
            reducer.joined = True
        try:
            self._of_ddp.main_hook()
        finally:
            if reducer is not None:
                reducer.joined = False
        # This flag of DDP says whether the other ranks average in this step, or accumulate.
        if reducer is not None and not reducer.leads and self._ddp.require_forward_param_sync:
            reducer.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take part in the final broadcast, after all ranks have joined."""
        self._of_ddp.post_hook(is_last_joiner)
        reduced = frozenset() if self._reducer is None else self._reducer.parameters
        group, module = self._ddp.process_group, self._ddp.module
        last = torch.tensor(
            dist.get_rank(group) if is_last_joiner else -1,
            dtype=torch.int64,
            device=self._ddp.join_device,
        )
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        broadcast_state(module, self._optimizers, reduced, group, int(last))


@torch.no_grad()
def broadcast_state(
    module: nn.Module,
    optimizers: Iterable[ConvertedOptimizer],
    kept: Container[Tensor],
    group: Any,
    source: int = 0,
) -> None:
    """Broadcast one rank's residuals, and its weights that DDP does not broadcast.

    Args:
        module: the module with the parameters.
        optimizers: the optimizers that train it.
        kept: the parameters that DDP ignores.
        group: the process group.
        source: the broadcasting rank, numbered in `group`.
    Raises:
        ValueError: ranks have converted different weights.
    """
    if dist.get_world_size(group) == 1:
        return
    trained = {p for p in module.parameters() if p.requires_grad}
    tensors: list[Tensor] = []
    for optimizer in optimizers:
        for _, _, parameter in optimizer.indexed_parameters():
            if parameter not in trained or parameter.device.type == "meta":
                continue
            if isinstance(parameter, SplitWeight):
                tensors += parameter.halves.tensors
                parameter.halves.version = next(VERSIONS)
                continue
            if parameter in kept:
                tensors.append(parameter.detach())
            if optimizer.keeps_residual(parameter):
                tensors.append(settled_residual(parameter))
    _check_equal(tensors, group, next(module.parameters()).device)
    for tensor in tensors:
        # Sent as bytes: gloo has no int16.
        data = tensor.contiguous().view(torch.uint8)
        dist.broadcast(data, group=group, group_src=source)
        if data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def _check_equal(tensors: list[Tensor], group: Any, device: torch.device) -> None:
    """Raise unless all ranks broadcast tensors of the same sizes, which would otherwise hang."""
    shapes = [(tuple(t.shape), str(t.dtype)) for t in tensors]
    digest = hashlib.sha256(repr(shapes).encode()).digest()[:7]
    mine = torch.tensor([int.from_bytes(digest, "big")], device=device, dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    if len({int(t) for t in every}) > 1:
        raise ValueError(
            "ranks converted different weights: all ranks need the same model, FP8Config and "
            "parameter groups"
        )
