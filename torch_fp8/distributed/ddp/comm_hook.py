"""The communication hook that averages DistributedDataParallel's gradients in 8 bits (O1, O2).

Two collectives of messages average a bucket (`torch_fp8.ops.messages`): an all-to-all sends each
rank the part that it owns from all ranks, and an all-gather sends the average of that part to all
ranks. Both round to nearest, so there is no state to save. Matrices of at least 4,096 elements
travel in groups of 32; vectors and small matrices travel as BF16 in the same message.

A bucket's two collectives cannot both run in the hook's call, which would wait for the other ranks,
or in a callback of the backend, whose few threads would wait for each other. Instead each call
issues the all-to-all of its own bucket and the all-gather of the previous bucket, and decodes the
bucket before that. The call for the last bucket finishes all buckets; the call for the first, small
bucket finishes its own. This order is the same on all ranks. On CUDA everything runs on a separate
stream, and the computing stream waits for it at the end of backward.

If other gradients are averaged beside DDP (`fp8_grad_reducer`) in the same process group, their
collectives come first, and buckets that are ready earlier wait. Ranks may become ready in different
orders, so they need one fixed order.

Gradients without an 8-bit form (sparse or float64) are averaged as without the hook. Ranks that
have joined (uneven inputs) send zeros, and the average counts them, as with torch's own hooks.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fp8.distributed.averaging import (
    DTYPES,
    CommunicationStream,
    Stages,
    average_runs,
    runs_of,
)
from torch_fp8.distributed.ddp.fp8_grad_reducer import Float8GradReducer
from torch_fp8.distributed.links import Exchanges
from torch_fp8.quantization.block_scaled import MIN_NUMEL

Future: TypeAlias = torch.futures.Future[torch.Tensor]


def pieces_of(buffer: Tensor, gradients: list[Tensor]) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, numel, whether in groups) for each gradient, a view of a bucket's buffer."""
    for gradient in gradients:
        in_groups = gradient.ndim >= 2 and gradient.numel() >= MIN_NUMEL
        yield gradient.storage_offset() - buffer.storage_offset(), gradient.numel(), in_groups


class QuantizedAllReduce:
    """The hook's state: the process group, and the buckets in flight.

    Args:
        group: DDP's process group, of more than one rank.
        beside: the reducer of this DDP's other gradients, which goes first, or None if there is
            none.
        exchanges: the choice whether gradients travel in 8 bits or in their dtype, or None for 8
            bits.
    """

    def __init__(
        self,
        group: Any,
        beside: Float8GradReducer | None = None,
        exchanges: Exchanges | None = None,
    ) -> None:
        self.group = group
        self.beside = beside
        self._exchanges = exchanges or Exchanges()
        self.world_size = dist.get_world_size(group)
        self._held: list[Stages] = []
        self._in_flight: list[Stages] = []
        self._stream = CommunicationStream()

    def average(self, bucket: dist.GradBucket) -> Future:
        """Start to average a bucket; the average replaces its buffer and is the future's value.

        Each call also advances the earlier buckets by one collective, the newest first. The call
        for the last bucket finishes all of them.
        """
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._in_flight.clear()  # the last backward raised
            self._held.clear()
        future: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        stock = buffer.is_sparse or buffer.dtype not in DTYPES or not self._exchanges["average"]
        stages = self._average_stock if stock else self._average
        self._held.append(stages(bucket, buffer, future))
        beside, device = self.beside, buffer.device
        if beside is None or not beside.goes_first(
            lambda: self._release(device, True), bucket.index() == 0
        ):
            # With a static graph, all buckets of the first backward come as number 0, and DDP waits
            # for them before it returns.
            self._release(device, bucket.is_last() or bucket.index() == 0)
        return future

    def _release(self, device: torch.device, to_the_end: bool) -> None:
        """Start to average the buckets that were held back, in order."""
        with self._stream.beside(device):
            while self._held:
                self._in_flight.insert(0, self._held.pop(0))
                self._advance()
            while to_the_end and self._in_flight:
                self._advance()

    def _advance(self) -> None:
        """Advance each bucket in flight by one stage, and drop the finished ones."""
        self._in_flight = [s for s in self._in_flight if next(s, "ended") is None]

    def _average(self, bucket: dist.GradBucket, buffer: Tensor, future: Future) -> Stages:
        """Average a bucket in 8 bits."""
        runs = runs_of(pieces_of(buffer, bucket.gradients()))
        yield from average_runs(buffer, runs, self.group, 1 / self.world_size)
        future.set_result(buffer)

    def _average_stock(self, bucket: dist.GradBucket, buffer: Tensor, future: Future) -> Stages:
        """Average a bucket without 8-bit form in its own dtype, as without a hook."""
        buffer.div_(self.world_size)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        yield
        yield  # no second collective
        future.set_result(work.get_future().wait()[0])

    def __reduce__(self) -> Any:
        # The state belongs to DDP's process group; a copy of DDP gets another one.
        return type(None), ()


def average_bucket(state: QuantizedAllReduce, bucket: dist.GradBucket) -> Future:
    """Average a bucket; for ``ddp.register_comm_hook(QuantizedAllReduce(group), ...)``."""
    return state.average(bucket)
