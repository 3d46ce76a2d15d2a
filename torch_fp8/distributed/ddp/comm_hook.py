"""The communication hook of DistributedDataParallel that averages gradients in 8 bits, at O1 and
O2.

A bucket is averaged in two collectives of messages (`torch_fp8.ops.messages`): an all-to-all that
brings each rank the part that it owns from everybody, and an all-gather of the average that it made
of it. Both round to nearest, so there is no state to save. In groups of 32 travel the matrices of
at least 4,096 elements; vectors and small matrices travel as BF16 in the same message.

The two collectives of a bucket cannot follow each other within its own call, which would wait for
the ranks, nor in a callback of the backend, whose few threads then wait for each other. So each
call issues its bucket's all-to-all, then the all-gather of the bucket before, then decodes the one
before that; the call of the last bucket brings all to their end, that of the first, small one its
own. That order is the same on all ranks. On CUDA everything runs on a stream beside the one that
computes, which waits when backward ends.

Where other gradients are averaged beside DDP (`fp8_grad_reducer`), in the same process group, their
collectives come first and these follow: buckets that are ready before are held back. Which of them
are ready first may differ by rank, and so there is one order.

What a bucket holds that has no 8-bit form, sparse gradients and float64, is averaged as without the
hook. Ranks that have joined (uneven inputs) send zeros, and the average counts them, as it does
with torch's own hooks.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fp8.distributed.averaging import DTYPES, Stages, average_runs, runs_of
from torch_fp8.distributed.collectives import CommunicationStream
from torch_fp8.distributed.ddp.fp8_grad_reducer import Float8GradReducer
from torch_fp8.distributed.links import Exchanges
from torch_fp8.quantization.block_scaled import MIN_NUMEL

Future: TypeAlias = torch.futures.Future[torch.Tensor]


def pieces_of(buffer: Tensor, gradients: list[Tensor]) -> Iterator[tuple[int, int, bool]]:
    """Yield the place of each gradient of a bucket, a view of its buffer, and whether it travels in
    groups.
    """
    for gradient in gradients:
        in_groups = gradient.ndim >= 2 and gradient.numel() >= MIN_NUMEL
        yield gradient.storage_offset() - buffer.storage_offset(), gradient.numel(), in_groups


class QuantizedAllReduce:
    """The state of the hook: the ranks that average, and the buckets on their way.

    Args:
        group: DDP's process group, of more than one rank.
        beside: what averages other gradients of this DDP, and goes first.
        exchanges: whether gradients travel in 8 bits; else in their dtype. None: they do.
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
        self._is_last = False
        self._stream = CommunicationStream()

    def average(self, bucket: dist.GradBucket) -> Future:
        """Begin to average a bucket; the average replaces its buffer and is the future's value.

        Each call takes the buckets before it one collective further, the newest first, and the call
        of the last bucket takes all of them to their end.
        """
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._in_flight.clear()  # the last backward raised
            self._held.clear()
        future: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        stock = buffer.is_sparse or buffer.dtype not in DTYPES or not self._exchanges["average"]
        stages = self._average_stock if stock else self._average
        self._held.append(stages(bucket, buffer, future))
        self._is_last = bucket.is_last()
        beside, device = self.beside, buffer.device
        if beside is None or not beside.goes_first(
            lambda: self._release(device, True), bucket.index() == 0
        ):
            # With a static graph, all buckets of the first backward come as number 0, and DDP waits
            # for them before it returns.
            self._release(device, self._is_last or bucket.index() == 0)
        return future

    def _release(self, device: torch.device, to_the_end: bool) -> None:
        """Begin to average the buckets that were held back, in their order."""
        with self._stream.beside(device):
            while self._held:
                self._in_flight.insert(0, self._held.pop(0))
                self._advance()
            while to_the_end and self._in_flight:
                self._advance()

    def _advance(self) -> None:
        """Advance each bucket on its way by one stage; those that have ended are dropped."""
        self._in_flight = [s for s in self._in_flight if next(s, "ended") is None]

    def _average(self, bucket: dist.GradBucket, buffer: Tensor, future: Future) -> Stages:
        """Average a bucket in 8 bits."""
        runs = runs_of(pieces_of(buffer, bucket.gradients()))
        yield from average_runs(buffer, runs, self.group, 1 / self.world_size)
        future.set_result(buffer)

    def _average_stock(self, bucket: dist.GradBucket, buffer: Tensor, future: Future) -> Stages:
        """Average what has no 8-bit form in its own dtype, as without a hook."""
        buffer.div_(self.world_size)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        yield
        yield  # no second collective
        future.set_result(work.get_future().wait()[0])

    def __reduce__(self) -> Any:
        # The state goes with DDP's own process group, which a copy gets anew.
        return type(None), ()


def average_bucket(state: QuantizedAllReduce, bucket: dist.GradBucket) -> Future:
    """Run as ``ddp.register_comm_hook(QuantizedAllReduce(group), average_bucket)``."""
    return state.average(bucket)
