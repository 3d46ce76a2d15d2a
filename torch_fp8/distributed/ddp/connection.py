"""`DDPConnection`: our communication hook on DistributedDataParallel, and uneven inputs.

DDP accepts one hook, and a user may register it after wrapping the module. So ours is registered as
late as possible: at the first forward, or when a rank joins (uneven inputs) without a forward.
"""

import hashlib
import weakref
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_fp8.distributed.ddp.buckets import QuantizedAllReduce, average_bucket
from torch_fp8.distributed.ddp.fp8_grad_reducer import Float8GradReducer
from torch_fp8.distributed.links import Exchanges
from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.optim.converted import ConvertedOptimizer
from torch_fp8.optim.residual import settled_residual
from torch_fp8.tensor.halves import VERSIONS
from torch_fp8.tensor.split_weight import SplitWeight


@dataclass
class Join(JoinHook):
    """The hook of a rank that has joined: DDP's part, and ours."""

    ddp: DistributedDataParallel
    of_ddp: JoinHook
    reducer: Float8GradReducer | None
    optimizers: list[ConvertedOptimizer]

    def main_hook(self) -> None:
        """Take part in one step of the other ranks."""
        reducer = self.reducer
        if reducer is None:
            self.of_ddp.main_hook()
            return
        reducer.joined = True
        try:
            self.of_ddp.main_hook()
        finally:
            reducer.joined = False
        # This flag of DDP says whether the other ranks average in this step, or accumulate.
        if not reducer.leads and self.ddp.require_forward_param_sync:
            reducer.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take part in the final broadcast, after all ranks have joined."""
        self.of_ddp.post_hook(is_last_joiner)
        reduced = frozenset() if self.reducer is None else self.reducer.parameters
        group, module = self.ddp.process_group, self.ddp.module
        rank = dist.get_rank(group) if is_last_joiner else -1
        last = torch.tensor(rank, dtype=torch.int64, device=self.ddp.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        broadcast_state(module, self.optimizers, reduced, group, int(last))


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


@dataclass(frozen=True)
class DDPReport:
    """How the gradients of a DistributedDataParallel are averaged.

    Attributes:
        num_ranks: the number of ranks.
        reason: the reason why DDP's buckets are not averaged in FP8, or None if they are.
        num_fp8_gradients: the number of weights whose gradients are averaged outside DDP.
        fp8_exchange: whether these gradients travel in FP8.
        note: a note on the choice of ``communication="auto"``; empty if it made none.
    """

    num_ranks: int
    reason: str | None = None
    num_fp8_gradients: int = 0
    fp8_exchange: bool = True
    note: str = ""

    def __str__(self) -> str:
        if self.num_ranks == 1:
            return "1, so nothing is exchanged"
        text = f"{self.num_ranks}, gradients averaged in "
        if self.reason is None:
            return f"{text}FP8, 1.03 bytes each{f', {self.note}' if self.note else ''}"
        if self.num_fp8_gradients and self.fp8_exchange:
            text += f"FP8 if they have 8 bits ({self.num_fp8_gradients}), others in "
        return f"{text}their dtype: {self.reason}"


def reason_without_hook(ddp: DistributedDataParallel) -> str | None:
    """Return why our hook must not be registered, as far as is known now, or None."""
    name = ddp._get_ddp_logging_data().get("comm_hook")
    if name not in (None, "", average_bucket.__qualname__):  # the user's, Python or built in
        return f"the communication hook {name} is registered"
    if torch._dynamo.config.optimize_ddp == "python_reducer":
        return "torch.compile exchanges them itself (optimize_ddp='python_reducer')"
    return None


class DDPConnection:
    """What this package adds to one DistributedDataParallel; a copy of it has only our hook.

    Args:
        ddp: the DistributedDataParallel of several ranks.
        exchanges: the choice between 8 bits and the gradients' own dtype.
        reducer: the reducer of the gradients that DDP ignores, or None if there are none.
        averages: whether our hook averages DDP's buckets, unless the first forward finds another.
        optimizers: the optimizers that train it, whose residuals a rank shares after a join.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        exchanges: Exchanges,
        reducer: Float8GradReducer | None,
        averages: bool,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        self._ddp, self._exchanges, self._reducer = weakref.ref(ddp), exchanges, reducer
        self._averages, self._registered = averages, False
        self._optimizers: dict[weakref.ref[ConvertedOptimizer], None] = {}
        self.train_with(optimizers)

    def train_with(self, optimizers: Iterable[Optimizer]) -> None:
        """Add optimizers that train the module."""
        ours = (o for o in optimizers if isinstance(o, ConvertedOptimizer))
        self._optimizers |= dict.fromkeys(map(weakref.ref, ours))

    def connect(self, ddp: DistributedDataParallel) -> None:
        """Run in each forward of `ddp`, and in place of its ``join_hook``."""
        ddp.register_forward_pre_hook(self.register_hook)
        if self._reducer is not None:
            ddp.register_forward_hook(self.prepare)
        ddp.join_hook = self.join

    @torch.compiler.disable
    def register_hook(self, ddp: DistributedDataParallel, args: Any = ()) -> None:
        """Register the communication hook, once."""
        if self._registered or not self._averages:
            return
        self._registered = True
        wanted = self._exchanges["average"] or self._reducer is not None
        if wanted and reason_without_hook(ddp) is None:
            goes_first = None if self._reducer is None else self._reducer.goes_first
            state = QuantizedAllReduce(ddp.process_group, goes_first, self._exchanges)
            ddp.register_comm_hook(state, average_bucket)
            if self._reducer is not None:
                self._reducer.leads = True

    @torch.compiler.disable
    def prepare(self, ddp: DistributedDataParallel, args: Any, output: Any) -> None:
        """Prepare the reducer for the backward of a forward's output, or of a loss."""
        if self._reducer is not None and torch.is_grad_enabled():
            self._reducer.prepare(output, ddp.require_backward_grad_sync)

    def join(self, **kwargs: Any) -> JoinHook:
        """Return the hook of a rank that may run out of inputs, also before its first forward."""
        ddp: Any = self._ddp()
        self.register_hook(ddp)
        of_ddp: JoinHook = type(ddp).join_hook(ddp, **kwargs)
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        return Join(ddp, of_ddp, self._reducer, optimizers) if self._optimizers else of_ddp

    def __reduce__(self) -> Any:
        return DDPConnection, (self._ddp(), self._exchanges, None, self._averages)


def connection_of(ddp: nn.Module) -> DDPConnection | None:
    """Return what `DDPConnection.connect` has connected, or None."""
    connection = getattr(vars(without_compiler(ddp)).get("join_hook"), "__self__", None)
    return connection if isinstance(connection, DDPConnection) else None
