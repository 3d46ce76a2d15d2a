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

What a bucket holds that has no 8-bit form, sparse gradients and float64, is averaged as without the
hook. Ranks that have joined (uneven inputs) send zeros, and the average counts them, as it does
with torch's own hooks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.distributed.collectives import CommunicationStream, all_gather, all_to_all
from torch_fp8.ops import messages
from torch_fp8.quantization.block_scaled import MIN_NUMEL
from torch_fp8.quantization.formats import GROUP_SIZE

_WIRE_DTYPES = (torch.bfloat16, torch.float32)
_DTYPES = (*_WIRE_DTYPES, torch.float16)


class Run(NamedTuple):
    """Neighbours in a bucket that travel in the same form: elements ``start`` to ``stop``."""

    start: int
    stop: int
    in_groups: bool


def runs_of(buffer: Tensor, gradients: list[Tensor]) -> list[Run]:
    """Split the gradients of a bucket, views of its buffer, into runs that travel in the same form.

    A run in groups has a multiple of 32 elements, unless it is followed by a run of another kind or
    by a gradient that would start within a group.
    """
    runs: list[Run] = []
    for gradient in gradients:
        start = gradient.storage_offset() - buffer.storage_offset()
        in_groups = gradient.ndim >= 2 and gradient.numel() >= MIN_NUMEL
        run = Run(start, start + gradient.numel(), in_groups)
        last = runs[-1] if runs else None
        whole = last is not None and (not in_groups or (last.stop - last.start) % GROUP_SIZE == 0)
        if last is not None and last.in_groups == in_groups and last.stop == start and whole:
            runs[-1] = Run(last.start, run.stop, in_groups)
        else:
            runs.append(run)
    return runs


class QuantizedAllReduce:
    """The state of the hook: the ranks that average, and the buckets on their way.

    Args:
        group: DDP's process group, of more than one rank.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._in_flight: list[_Bucket | _Stock] = []
        self._stream = CommunicationStream()

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to average a bucket; the average replaces its buffer and is the future's value."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._in_flight.clear()  # the last backward raised
        with self._beside(buffer.device):
            kind = _Stock if buffer.is_sparse or buffer.dtype not in _DTYPES else _Bucket
            self._in_flight.append(kind(self, bucket, buffer))
            future = self._in_flight[-1].future
            if len(self._in_flight) > 1:
                self._in_flight[-2].gather()
            if len(self._in_flight) > 2:
                self._in_flight.pop(0).finish()
            # With a static graph, all buckets of the first backward come as number 0, and DDP waits
            # for them before it returns.
            if bucket.is_last() or bucket.index() == 0:
                self._in_flight[-1].gather()
                while self._in_flight:
                    self._in_flight.pop(0).finish()
        return future

    def _beside(self, device: torch.device) -> Any:
        """Queue the CUDA work within behind what computes now, on a stream beside it."""
        return self._stream.beside(device)

    def __reduce__(self) -> Any:
        # The state goes with DDP's own process group, which a copy gets anew.
        return _nothing, ()


def average_bucket(
    state: QuantizedAllReduce, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Run as ``ddp.register_comm_hook(QuantizedAllReduce(group), average_bucket)``."""
    return state.average(bucket)


class _Bucket:
    """A bucket on its way in 8 bits."""

    def __init__(self, state: QuantizedAllReduce, bucket: dist.GradBucket, buffer: Tensor) -> None:
        self.future = _future(buffer)
        self._state, self._buffer = state, buffer
        self._runs = runs_of(buffer, bucket.gradients())
        ranks = state.world_size
        groups, plain = self._part(True), self._part(False)
        values = _joined([buffer[run.start : run.stop] for run in groups], GROUP_SIZE, buffer)
        others = _joined([buffer[run.start : run.stop] for run in plain], 1, buffer)
        self._numel, self._num_plain = values.numel(), others.numel()
        self._layout = messages.split_layout(self._numel, self._num_plain, ranks)
        values = values if values.dtype in _WIRE_DTYPES else values.float()
        self._sent = messages.pack_flat(values, others, self._layout, ranks)
        self._received = torch.empty_like(self._sent)
        self._work = all_to_all(self._received, self._sent, state.group, async_op=True)

    def gather(self) -> None:
        """Average the part that this rank owns, and send it to all."""
        self._work.wait()
        state = self._state
        combined = messages.reduce_and_repack(self._received, self._layout, 1 / state.world_size)
        self._sent, self._received = combined, self._sent  # which is no longer needed
        self._work = all_gather(self._received, combined, state.group, async_op=True)

    def finish(self) -> None:
        """Write the average into the bucket."""
        self._work.wait()
        groups, plain = self._part(True), self._part(False)
        values = self._target(groups, self._numel, _WIRE_DTYPES)
        others = self._target(plain, self._num_plain, _DTYPES)
        messages.unpack_flat(self._received, self._layout, values, others)
        for runs, source, multiple in ((groups, values, GROUP_SIZE), (plain, others, 1)):
            position = 0
            for run in runs:
                size = run.stop - run.start
                target = self._buffer[run.start : run.stop]
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source[position : position + size])
                position += -(-size // multiple) * multiple
        self.future.set_result(self._buffer)

    def _part(self, in_groups: bool) -> list[Run]:
        return [run for run in self._runs if run.in_groups == in_groups]

    def _target(self, runs: list[Run], numel: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """Return where a kind is decoded: in a single run's own place, or in memory for all
        runs.
        """
        if len(runs) == 1 and self._buffer.dtype in dtypes:
            return self._buffer[runs[0].start : runs[0].stop]
        dtype = self._buffer.dtype if self._buffer.dtype in dtypes else torch.float32
        return self._buffer.new_empty(numel, dtype=dtype)


class _Stock:
    """A bucket that is averaged in its own dtype, as without the hook."""

    def __init__(self, state: QuantizedAllReduce, bucket: dist.GradBucket, buffer: Tensor) -> None:
        self.future = _future(buffer)
        buffer.div_(state.world_size)
        self._work = dist.all_reduce(buffer, group=state.group, async_op=True)

    def gather(self) -> None:
        """Do nothing: one collective is enough."""

    def finish(self) -> None:
        self.future.set_result(self._work.get_future().wait()[0])


def _joined(pieces: list[Tensor], multiple: int, like: Tensor) -> Tensor:
    """Join pieces to one flat tensor; each of several is zero-padded to a `multiple` of
    elements.
    """
    if len(pieces) == 1:
        return pieces[0]
    padded = [F.pad(piece, (0, -piece.numel() % multiple)) for piece in pieces]
    return torch.cat(padded) if padded else like.new_empty(0)


def _future(buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])


def _nothing() -> None:
    return None
