"""Averaging of 8-bit gradients over the ranks of DistributedDataParallel, while backward runs.

DDP's reducer wants plain gradients in its buckets, 2 bytes per parameter that stay. Weights with
8-bit gradients are therefore on its ignore list, and are averaged here: as a gradient becomes ready
it is sent, and as soon as its average is there it is quantized and the plain tensor freed.

* Collectives run in one order on all ranks, first that of the module, reversed, then the order in
  which rank 0's gradients became ready; in a process group of their own, since DDP's collectives
  come in between at places that differ.
* What has not become ready when backward ends is sent then. A rank without a gradient sends minus
  zeros: an average of nothing but these says that nobody had one, and leaves ``p.grad`` None.
* Gradients that were accumulated under ``no_sync`` are averaged with the last micro-batch's.
* All ranks round the average with the same random bits, so they stay equal bit for bit; an Inf or
  NaN of one is seen by all.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.gradient_hooks import hook_of
from torch_fp8.gradients import Float8Grad

_MAX_IN_FLIGHT = 50 << 20
"""Bytes of plain gradients that are sent before the oldest is waited for: two of DDP's buckets."""


class _Sent(NamedTuple):
    """A gradient on its way: the parameter, its buffer, the collective, whether it has none."""

    parameter: Tensor
    buffer: Tensor
    work: Any
    missing: bool


class GradientExchange:
    """Averages the gradients of some parameters; `GradientHook` calls it.

    Args:
        parameters: the same ones in the same order on all ranks.
        group: process group of its own.

    Attributes:
        parameters: those that it averages.
        rank: this process's.
    """

    def __init__(self, parameters: Iterable[Tensor], group: Any) -> None:
        self._order = list(parameters)[::-1]
        self.parameters = frozenset(self._order)
        self._group = group
        self._world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._learned = False
        self._active = False
        self._without_output_hooks = False
        self._start()

    def _start(self) -> None:
        self._next = 0
        self._ready: dict[Tensor, None] = {}
        self._in_flight: deque[_Sent] = deque()

    def prepare(self, output: Any, synchronize: bool) -> None:
        """A forward has run; the backward through its `output` is to average, or not."""
        if self._active:  # the last backward raised
            for sent in self._in_flight:
                sent.work.wait()
            self._active = False
        tensors = [t for t in _tensors(output) if t.requires_grad]
        self._without_output_hooks = synchronize and not tensors
        if synchronize:
            for tensor in tensors:
                tensor.register_hook(self._begin)

    def begun(self) -> bool:
        """Whether the backward that runs averages gradients."""
        if self._without_output_hooks and not self._active:
            self._begin()
        return self._active

    def ready(self, parameter: Tensor) -> None:
        """Take over ``parameter.grad``, which is complete on this rank."""
        self._ready[parameter] = None
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._send(self._order[self._next])
            self._next += 1

    def _begin(self, _: Any = None) -> None:
        # The output's gradient comes before any nested backward (of a reentrant checkpoint), so
        # the end that is waited for is the outermost one's.
        if not self._active:
            self._active = True
            self._start()
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        for parameter in self._order[self._next :]:
            if parameter.requires_grad:
                self._send(parameter)
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        self._active = False
        if not self._learned:
            self._learn_order()
        self._start()

    def _send(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:
            buffer = torch.full_like(parameter, -0.0, memory_format=torch.contiguous_format)
        elif isinstance(grad, Float8Grad):
            buffer = grad.dequantize()
        else:
            buffer = grad.contiguous()
        buffer.div_(self._world_size)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._in_flight.append(_Sent(parameter, buffer, work, grad is None))
        while sum(sent.buffer.nbytes for sent in self._in_flight) > _MAX_IN_FLIGHT:
            self._complete(self._in_flight.popleft())

    def _complete(self, sent: _Sent) -> None:
        parameter, average, work, missing = sent
        work.wait()
        if missing and bool((average.signbit() & (average == 0)).all()):
            return  # nobody had one
        if isinstance(parameter.grad, Float8Grad):
            parameter.grad.store(average, exchanged=True)
            return
        parameter.grad = average
        hook = hook_of(parameter)
        if hook is not None:
            hook.to_float8(parameter, exchanged=True)

    def _learn_order(self) -> None:
        """From now on, the order in which rank 0's gradients became ready."""
        place = {parameter: i for i, parameter in enumerate(self._order)}
        first = [place[parameter] for parameter in self._ready]
        rest = sorted(set(place.values()) - set(first))
        order = torch.tensor(first + rest, device=self._order[0].device)
        dist.broadcast(order, group=self._group, group_src=0)
        self._order = [self._order[i] for i in order.tolist()]
        self._learned = True

    def __reduce__(self) -> Any:
        # A copy of a DDP module has its own gradients, and process groups are not to be copied.
        return _nothing, ()


class ForwardHook:
    """Tells the exchange of each forward of a DistributedDataParallel."""

    def __init__(self, exchange: GradientExchange | None) -> None:
        self._exchange = exchange

    @torch._dynamo.disable
    def __call__(self, ddp: DistributedDataParallel, args: Any, output: Any) -> None:
        if self._exchange is not None and torch.is_grad_enabled():
            self._exchange.prepare(output, ddp.require_backward_grad_sync)


def _nothing() -> None:
    return None


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(output):
        yield from _tensors([getattr(output, f.name) for f in dataclasses.fields(output)])
