"""Averaging of 8-bit gradients over the ranks of DistributedDataParallel during backward.

DDP's reducer needs plain gradients of the Parameter's dtype in its buckets, which are permanent.
Weights with 8-bit gradients, and weights in two halves, which would need 4 bytes there, are
therefore on its ignore list and averaged here (`torch_fp8.distributed.ddp.wrap`). When a gradient
becomes ready, it is quantized and the plain tensor is freed. Several gradients form a bucket, which
is sent as messages; the returned codes and scales replace those in ``p.grad``
(`torch_fp8.distributed.ddp.buckets`). With ``communication="off"`` each gradient is sent in its
dtype, and at O3 the average is quantized.

* Collectives run in one order on all ranks: in the first step the module's order, reversed, then
  the order in which rank 0's gradients became ready. DDP's own collectives in the same process
  group follow after all of these have started (`buckets`), because its buckets become ready at
  different points. If DDP's buckets cannot wait, these collectives follow DDP's instead. That is
  the case if the user's hook averages DDP's buckets, and from the second backward on with reentrant
  checkpoints, in which DDP may finish.
* Gradients that are not ready when backward ends are sent then. A rank without a gradient sends
  zeros and a flag (without FP8: minus zeros), so ``p.grad`` stays None if no rank had one.
* Gradients accumulated under ``no_sync`` are averaged with those of the last micro-batch.
* All ranks get the same average, bit for bit; all ranks see an Inf or NaN of one rank.
* In FP8 nothing waits for other ranks before backward ends. On CUDA a bucket's second collective
  follows the first collective of the next bucket, on a separate stream; on the CPU all second
  collectives come at the end. If ranks waited in between, a rank whose gradients become ready in
  another order could wait for one that waits for it in DDP's own hook.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from torch_fp8.distributed.averaging import CommunicationStream
from torch_fp8.distributed.ddp.buckets import GradientBucket
from torch_fp8.distributed.links import Exchanges
from torch_fp8.optim.gradient_slot import GradientSlot
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.weight_half import gradient_dtype

_BUCKET_NUMEL = 8 << 20
"""The minimum number of elements sent together; a DDP bucket has 13 million in BF16."""

_MAX_IN_FLIGHT = 50 << 20
"""The bytes of plain gradients in flight above which the reducer waits for the oldest: two DDP
buckets.
"""


class Float8GradReducer:
    """Averages the gradients of some parameters; it is the exchange of their slots.

    Args:
        slots: the slots of the parameters, the same in the same order on all ranks.
        group: DDP's process group.
        exchanges: the choice between FP8 and the gradients' own dtype, or None for FP8.
    Attributes:
        parameters: the parameters whose gradients are averaged.
        rank: this process's rank.
        leads: whether our hook runs DDP's collectives, so that they can follow these.
        joined: whether this rank has run out of inputs and only joins the others' collectives.
    """

    leads = joined = False
    _learned = _active = _is_nested = _without_output_hooks = False
    _task = -1
    _release: Callable[[], None] | None = None

    def __init__(
        self,
        slots: Mapping[Tensor, GradientSlot],
        group: Any,
        exchanges: Exchanges | None = None,
    ) -> None:
        self._slots, self._order = slots, list(slots)[::-1]
        self.parameters = frozenset(slots)
        self._group, self._exchanges = group, exchanges or Exchanges()
        self.rank = dist.get_rank(group)
        self._stream = CommunicationStream()
        self._overlaps = self._order[0].is_cuda
        self._start()

    def _start(self) -> None:
        self._fp8 = self._exchanges["average"]
        self._buckets = deque(_buckets(self._order, _BUCKET_NUMEL if self._fp8 else 1))
        self._ready: dict[Tensor, None] = {}
        self._in_flight: deque[GradientBucket | _PlainGradient] = deque()

    def prepare(self, output: Any, synchronize: bool) -> None:
        """Prepare for the backward of `output`, which averages gradients if `synchronize`."""
        if self._active:  # left over if the last backward raised
            for sent in self._in_flight:
                sent.work.wait()
            self._active = False
        tensors = [t for t in _tensors(output) if t.requires_grad]
        self._without_output_hooks = synchronize and not tensors
        if synchronize:
            for tensor in tensors:
                tensor.register_hook(self._begin)

    def ready(self, parameter: Tensor) -> bool:
        """Take ``parameter.grad``, complete on this rank; return whether this backward averages."""
        if self._without_output_hooks:
            self._begin()
        if not self._active:
            return False
        self._ready[parameter] = None
        if self._fp8:
            self._quantize(parameter)
        while self.leads and self._buckets:
            if any(p.requires_grad and p not in self._ready for p in self._buckets[0]):
                break
            self._send(self._buckets.popleft())
        return True

    def goes_first(self, release: Callable[[], None], is_first: bool) -> bool:
        """Return whether a bucket of DDP has to wait for these collectives.

        Args:
            release: the function that sends waiting buckets; called once in this backward, when all
                of our collectives have started.
            is_first: whether the bucket is the first one of its backward.
        """
        if not self.leads:
            return False
        if self.joined:
            if is_first:
                self.take_part()
            return False
        self._begin()
        if torch._C._current_graph_task_id() != self._task:
            self._is_nested = True
            return False
        self._release = release
        return True

    def take_part(self) -> None:
        """Send zeros in a backward of the other ranks; this rank's gradients don't change."""
        stored = [(parameter, stored_grad(parameter)) for parameter in self._order]
        for parameter, _ in stored:
            parameter.grad = None
        self._start()
        self._finish()
        for parameter, grad in stored:
            parameter.grad = grad

    def _begin(self, _: Any = None) -> None:
        # The output's gradient comes before any nested backward (of a reentrant checkpoint), so
        # the end that is waited for is the outermost one's.
        if not self._active:
            self._active = True
            self._start()
            self._release = None
            self._task = torch._C._current_graph_task_id()
            # Callbacks run in order, and DDP has queued its own by the time `_follow` runs.
            Variable._execution_engine.queue_callback(self._finish if self.leads else self._follow)

    def _follow(self) -> None:
        Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        while self._buckets:
            self._send(self._buckets.popleft())
        with self._stream.beside(self._order[0].device):
            for sent in self._in_flight:
                sent.gather()
        if not self._learned:
            self._learn_order()
        if self._release is not None:
            self._release()
            self._release = None
        with self._stream.beside(self._order[0].device):
            while self._in_flight:
                self._in_flight.popleft().finish()
        self._stream.join()
        self._active = False
        self.leads = self.leads and not self._is_nested
        self._start()

    def _send(self, bucket: list[Tensor]) -> None:
        parameters = [p for p in bucket if p.requires_grad]
        if not parameters:
            return
        if not self._fp8:
            slot = self._slots[parameters[0]]
            self._in_flight.append(_PlainGradient(parameters[0], slot, self._group))
            while sum(sent.nbytes for sent in self._in_flight) > _MAX_IN_FLIGHT:
                self._in_flight.popleft().finish()
            return
        for parameter in parameters:
            if parameter not in self._ready:
                self._quantize(parameter)
        slots = {parameter: self._slots[parameter] for parameter in parameters}
        with self._stream.beside(parameters[0].device):
            self._in_flight.append(GradientBucket(slots, self._group))
            if self._overlaps:
                if len(self._in_flight) > 1:
                    self._in_flight[-2].gather()
                if len(self._in_flight) > 2:
                    self._in_flight.popleft().finish()

    def _quantize(self, parameter: Tensor) -> None:
        """Quantize ``parameter.grad`` to the form that `GradientBucket` needs."""
        grad = stored_grad(parameter)
        if isinstance(grad, Float8Grad):
            if parameter not in self._ready:  # it may have been scaled after accumulation
                grad.store(grad.dequantize(torch.float32))
        elif grad is not None:
            self._slots[parameter].to_float8(parameter)

    def _learn_order(self) -> None:
        """Adopt the order in which rank 0's gradients became ready, for later steps."""
        place = {parameter: i for i, parameter in enumerate(self._order)}
        first = [place[parameter] for parameter in self._ready]
        rest = sorted(set(place.values()) - set(first))
        order = torch.tensor(first + rest, device=self._order[0].device, dtype=torch.int64)
        dist.broadcast(order, group=self._group, group_src=0)
        self._order = [self._order[i] for i in order.tolist()]
        self._learned = True

    def __reduce__(self) -> Any:
        # A copy of a DDP module has its own gradients, and process groups must not be copied.
        return type(None), ()


class _PlainGradient:
    """A gradient in flight in its own dtype: one all-reduce, after which `finish` quantizes it."""

    def __init__(self, parameter: Tensor, slot: GradientSlot, group: Any) -> None:
        self._parameter, self._slot = parameter, slot
        grad, dtype = stored_grad(parameter), gradient_dtype(parameter)
        self._missing = grad is None
        if grad is None:
            buffer = torch.full(parameter.shape, -0.0, dtype=dtype, device=parameter.device)
        elif isinstance(grad, Float8Grad):
            buffer = grad.dequantize(dtype)
        else:
            buffer = grad.to(dtype).contiguous()
        self._buffer = buffer.div_(dist.get_world_size(group))
        self.nbytes = buffer.nbytes
        self.work = dist.all_reduce(buffer, group=group, async_op=True)

    def gather(self) -> None:
        """Do nothing, because one all-reduce is enough."""

    def finish(self) -> None:
        """Store the average in ``p.grad``, or None if no rank had a gradient."""
        self.work.wait()
        parameter, average = self._parameter, self._buffer
        if self._missing and bool((average.signbit() & (average == 0)).all()):
            return
        grad = stored_grad(parameter)
        if isinstance(grad, Float8Grad):
            grad.store(average, exchanged=True)
            return
        parameter.grad = average
        if self._slot.quantize:
            self._slot.to_float8(parameter, exchanged=True)


def _buckets(order: list[Tensor], numel: int) -> list[list[Tensor]]:
    """Group neighbours in the order into buckets of at least `numel` elements."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in order:
        if sum(p.numel() for p in buckets[-1]) >= numel:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a forward's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(output):
        yield from _tensors([getattr(output, f.name) for f in dataclasses.fields(output)])
