"""Averaging of 8-bit gradients over the ranks of DistributedDataParallel, while backward runs.

DDP's reducer wants plain gradients in its buckets, 2 bytes per parameter that stay. Weights with
8-bit gradients are therefore on its ignore list, and are averaged here: as a gradient becomes ready
it is quantized and the plain tensor freed; several together, a bucket, are sent as messages whose
codes and scales replace those in ``p.grad`` when they come back
(`torch_fp8.distributed.ddp.fp8_grad_bucket`). With ``communication="off"`` each is sent in its
dtype, and its average quantized.

* Collectives run in one order on all ranks, first that of the module, reversed, then the order in
  which rank 0's gradients became ready. DDP's own, in the same process group, follow when all of
  these have begun (`comm_hook`), for its buckets are ready at places that differ. Where its buckets
  cannot wait, these follow them: where another hook than ours averages DDP's, and with reentrant
  checkpoints, within which DDP may end, from the second backward on.
* What has not become ready when backward ends is sent then. A rank without a gradient sends zeros
  and says so (without FP8: minus zeros), so that ``p.grad`` stays None where nobody had one.
* Gradients that were accumulated under ``no_sync`` are averaged with the last micro-batch's.
* All ranks have the same average, bit for bit; an Inf or NaN of one is seen by all.
* In FP8 nothing waits for other ranks before backward ends: on CUDA the second collective of a
  bucket follows the next bucket's first, on a stream beside the one that computes; on the CPU all
  second ones come at the end. Waiting in between, a rank whose gradients become ready in another
  order than its peers' could wait for one that waits for it in DDP's own hook.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.distributed.collectives import CommunicationStream
from torch_fp8.distributed.ddp.fp8_grad_bucket import GradientBucket
from torch_fp8.distributed.links import Exchanges
from torch_fp8.optim.grad_hooks import hook_of
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.weight_half import gradient_dtype

_BUCKET_NUMEL = 8 << 20
"""The least number of elements that are sent together; a bucket of DDP has 13 million in BF16."""

_MAX_IN_FLIGHT = 50 << 20
"""The bytes of plain gradients in flight above which the oldest is waited for: two buckets of
DDP.
"""


class Float8GradReducer:
    """Averages the gradients of some parameters; `GradientHook` calls it.

    Args:
        parameters: the parameters to average, equal and in the same order on all ranks.
        group: DDP's process group.
        exchanges: whether gradients travel in FP8; else in their dtype. None: they do.

    Attributes:
        parameters: the parameters whose gradients are averaged.
        rank: this process's.
        leads: whether DDP's collectives are ours, and follow.
        joined: whether this rank has run out of inputs, and takes part in others' collectives.
    """

    def __init__(
        self, parameters: Iterable[Tensor], group: Any, exchanges: Exchanges | None = None
    ) -> None:
        self._order = list(parameters)[::-1]
        self.parameters = frozenset(self._order)
        self._group, self._exchanges = group, exchanges or Exchanges()
        self.rank = dist.get_rank(group)
        self._stream = CommunicationStream()
        self._overlaps = self._order[0].is_cuda
        self._learned = False
        self._active = False
        self.leads = False
        self.joined = False
        self._task = -1
        self._is_nested = False
        self._release: Callable[[], None] | None = None
        self._without_output_hooks = False
        self._start()

    def _start(self) -> None:
        self._fp8 = self._exchanges["average"]
        self._buckets = deque(_buckets(self._order, _BUCKET_NUMEL if self._fp8 else 1))
        self._ready: dict[Tensor, None] = {}
        self._in_flight: deque[GradientBucket | _PlainGradient] = deque()

    def prepare(self, output: Any, synchronize: bool) -> None:
        """Prepare for the backward through a forward's `output`, which is to average gradients or
        not.
        """
        if self._active:  # the last backward raised
            for sent in self._in_flight:
                sent.wait()
            self._active = False
        tensors = [t for t in _tensors(output) if t.requires_grad]
        self._without_output_hooks = synchronize and not tensors
        if synchronize:
            for tensor in tensors:
                tensor.register_hook(self._begin)

    def begun(self) -> bool:
        """Return whether the backward that runs averages gradients."""
        if self._without_output_hooks and not self._active:
            self._begin()
        return self._active

    def ready(self, parameter: Tensor) -> None:
        """Take over ``parameter.grad``, which is complete on this rank."""
        self._ready[parameter] = None
        if self._fp8:
            self._quantize(parameter)
        while self.leads and self._buckets and self._ready.keys() >= _trained(self._buckets[0]):
            self._send(self._buckets.popleft())

    def goes_first(self, release: Callable[[], None], is_first: bool) -> bool:
        """Return whether a bucket of DDP is to wait; `release` will then send those that have.

        Args:
            release: called once in this backward, when all of our collectives have begun.
            is_first: whether the bucket is the first of its backward.
        """
        if not self.leads:
            return False
        if self.joined:
            if is_first:
                self.take_part()
            return False
        if not self._active:
            self._begin()
        if torch._C._current_graph_task_id() != self._task:
            self._is_nested = True
            return False
        self._release = release
        return True

    def take_part(self) -> None:
        """Send zeros in a backward of the other ranks; gradients of this rank stay as they are."""
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
            # Callbacks run in their order, and DDP has queued its own by the time of `_follow`.
            then = self._finish if self.leads else self._follow
            Variable._execution_engine.queue_callback(then)

    def _follow(self) -> None:
        Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        while self._buckets:
            self._send(self._buckets.popleft())
        with self._stream.beside(self._order[0].device):
            if self._fp8:
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
            self._in_flight.append(_PlainGradient(parameters[0], self._group))
            while sum(sent.nbytes for sent in self._in_flight) > _MAX_IN_FLIGHT:
                self._in_flight.popleft().finish()
            return
        for parameter in parameters:
            if parameter not in self._ready:
                self._quantize(parameter)
        with self._stream.beside(parameters[0].device):
            self._in_flight.append(GradientBucket(parameters, self._group))
            if self._overlaps:
                if len(self._in_flight) > 1:
                    self._in_flight[-2].gather()
                if len(self._in_flight) > 2:
                    self._in_flight.popleft().finish()

    def _quantize(self, parameter: Tensor) -> None:
        """Quantize ``parameter.grad`` to what a `GradientBucket` takes."""
        grad, hook = stored_grad(parameter), hook_of(parameter)
        if grad is None:
            return
        if isinstance(grad, Float8Grad):
            if parameter not in self._ready:  # it may have been scaled since it was accumulated
                grad.store(grad.dequantize(torch.float32))
        elif hook is not None:
            hook.to_float8(parameter)
        else:
            parameter.grad = Float8Grad.quantize(grad)

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
        # A copy of a DDP module has its own gradients, and process groups are not to be copied.
        return type(None), ()


class ForwardHook:
    """A forward hook of DistributedDataParallel that tells the reducer of each forward."""

    def __init__(self, reducer: Float8GradReducer | None) -> None:
        self._reducer = reducer

    @torch._dynamo.disable
    def __call__(self, ddp: DistributedDataParallel, args: Any, output: Any) -> None:
        if self._reducer is not None and torch.is_grad_enabled():
            self._reducer.prepare(output, ddp.require_backward_grad_sync)


class _PlainGradient:
    """A gradient on its way in its own dtype: one all-reduce, then `finish` quantizes the
    average.
    """

    def __init__(self, parameter: Tensor, group: Any) -> None:
        self._parameter = parameter
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
        self._work = dist.all_reduce(buffer, group=group, async_op=True)

    def gather(self) -> None:
        """Do nothing: one collective is enough."""

    def finish(self) -> None:
        """Store the average as ``p.grad``; None if no rank had a gradient."""
        self._work.wait()
        parameter, average = self._parameter, self._buffer
        if self._missing and bool((average.signbit() & (average == 0)).all()):
            return
        grad = stored_grad(parameter)
        if isinstance(grad, Float8Grad):
            grad.store(average, exchanged=True)
            return
        parameter.grad = average
        hook = hook_of(parameter)
        if hook is not None and hook.quantize:
            hook.to_float8(parameter, exchanged=True)

    def wait(self) -> None:
        """Wait for the collective, without using its result."""
        self._work.wait()


def _buckets(order: list[Tensor], numel: int) -> list[list[Tensor]]:
    """Group neighbours in the order until they have `numel` elements."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in order:
        if sum(p.numel() for p in buckets[-1]) >= numel:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def _trained(parameters: list[Tensor]) -> set[Tensor]:
    return {parameter for parameter in parameters if parameter.requires_grad}


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a forward returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(output):
        yield from _tensors([getattr(output, f.name) for f in dataclasses.fields(output)])
