"""Buckets of gradients in flight: DistributedDataParallel's, and those of 8-bit gradients.

**DDP's buckets**, which its communication hook averages. Two collectives of messages average a
bucket (`torch_fp8.ops.messages`): an all-to-all sends each rank the part that it owns from all
ranks, and an all-gather sends the average of that part to all ranks. Both round to nearest, so
there is no state to save. Matrices of at least 4,096 elements travel in groups of 32; vectors and
small matrices travel as BF16 in the same message.

A bucket's two collectives cannot both run in the hook's call, which would wait for the other ranks,
or in a callback of the backend, whose few threads would wait for each other. Instead each call
issues the all-to-all of its own bucket and the all-gather of the previous bucket, and decodes the
bucket before that. The call for the last bucket finishes all buckets; the call for the first, small
bucket finishes its own. This order is the same on all ranks. On CUDA everything runs on a separate
stream, and the computing stream waits for it at the end of backward.

If other gradients are averaged outside DDP (`fp8_grad_reducer`) in the same process group, their
collectives come first, and buckets that are ready earlier wait. Gradients may become ready in
another order on each rank, but all ranks must run their collectives in the same order.

Gradients without an 8-bit form (sparse or float64) are averaged as without the hook. Ranks that
have joined (uneven inputs) send zeros, and the average counts them, as with torch's own hooks.

**Buckets of 8-bit gradients** have the codes and scales of several weights that DDP ignores. A
rank's ``p.grad`` is already rounded with its own random bits (`GradientSlot`). It is sent as it is:
codes and scales, with rows padded to groups of 32. The rank that owns a part sums it in float32 and
rounds the average stochastically, and all ranks store the codes and scales that it sends in
``p.grad``, at O2 decoded to BF16. There is no third rounding.

A rank without a gradient sends zeros. One flag per weight, a plain value, records whether any rank
had a gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.distributed.averaging import (
    DTYPES,
    CommunicationStream,
    Stages,
    all_gather,
    all_to_all,
    average_runs,
    runs_of,
)
from torch_fp8.distributed.links import Exchanges
from torch_fp8.kernels.arguments import GradientParts
from torch_fp8.ops import messages
from torch_fp8.ops.grad_codec import Rounding
from torch_fp8.optim.gradient_slot import GradientSlot
from torch_fp8.quantization.block_scaled import MIN_NUMEL, matrix_shape, num_groups
from torch_fp8.quantization.formats import GROUP_SIZE
from torch_fp8.quantization.stochastic_rounding import shifted_keys
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.weight_half import gradient_dtype

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
        goes_first: `Float8GradReducer.goes_first` of this DDP's other gradients, or None if there
            are none.
        exchanges: the choice between 8 bits and the gradients' own dtype, or None for 8 bits.
    """

    def __init__(
        self,
        group: Any,
        goes_first: Callable[[Callable[[], None], bool], bool] | None = None,
        exchanges: Exchanges | None = None,
    ) -> None:
        self.group = group
        self._goes_first = goes_first
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
        device, is_first = buffer.device, bucket.index() == 0
        if self._goes_first is None or not self._goes_first(
            lambda: self._release(device, True), is_first
        ):
            # With a static graph, all buckets of the first backward come as number 0, and DDP waits
            # for them before it returns.
            self._release(device, bucket.is_last() or is_first)
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


class GradientBucket:
    """A bucket of weights whose 8-bit gradients are averaged by `gather`, then `finish`.

    Args:
        slots: the slots of the same parameters in the same order on all ranks; ``grad`` is None
            or a `Float8Grad` with multiplier 1.
        group: the process group.
    Attributes:
        nbytes: the bytes of the messages that this rank sends.
        work: the collective in flight.
    """

    def __init__(self, slots: Mapping[Tensor, GradientSlot], group: Any) -> None:
        parameters = list(slots)
        self._slots, self._group = slots, group
        self._world_size = dist.get_world_size(group)
        self._missing = [stored_grad(parameter) is None for parameter in parameters]
        shapes = [matrix_shape(parameter.shape) for parameter in parameters]
        self._numels = [rows * num_groups(cols) * GROUP_SIZE for rows, cols in shapes]
        layout = messages.split_layout(sum(self._numels), len(parameters), self._world_size)
        self._layout = layout
        keys = self._rounding(parameters[0]).copy().next_exchanged()
        self._keys = shifted_keys(keys, dist.get_rank(group) * layout.num_values)
        device = parameters[0].device
        size = (self._world_size, layout.num_bytes)
        # (N, B): row r goes to rank r
        self._sent = torch.empty(size, dtype=torch.uint8, device=device)
        codes, scales = zip(*map(self._parts, parameters, self._numels), strict=True)
        _lay_out(codes, layout.codes(self._sent))
        _lay_out(scales, layout.scales(self._sent))
        present = [not missing for missing in self._missing]
        flags = torch.tensor(present, dtype=torch.bfloat16, device="cpu")
        _lay_out([flags.to(device, non_blocking=True)], layout.plain(self._sent))
        self.nbytes = self._sent.nbytes
        self._gathered = False
        self._received = torch.empty_like(self._sent)
        self.work = all_to_all(self._received, self._sent, group, async_op=True)

    def gather(self) -> None:
        """Average the part that this rank owns and send it to all; repeated calls do nothing."""
        if self._gathered:
            return
        self._gathered = True
        self.work.wait()
        scale = 1 / self._world_size
        combined = messages.reduce_and_repack(self._received, self._layout, scale, keys=self._keys)
        self._sent, self._received = combined, self._sent
        # (1, B) of each -> (N, B)
        self.work = all_gather(self._received, combined, self._group, async_op=True)

    def finish(self) -> None:
        """Store the average in ``p.grad``, in place if it exists, or None if no rank has one."""
        self.work.wait()
        codes = self._layout.codes(self._received)  # (ranks, 32 G)
        scales = self._layout.scales(self._received)  # (ranks, G)
        flags = self._layout.plain(self._received)
        if len(self._slots) > 1:
            # (ranks * 32 G,) and (ranks * G,)
            codes, scales = codes.reshape(-1), scales.reshape(-1)
        position = 0
        for i, (parameter, numel) in enumerate(zip(self._slots, self._numels, strict=True)):
            groups = slice(position // GROUP_SIZE, (position + numel) // GROUP_SIZE)
            values = slice(position, position + numel)
            position += numel
            if self._missing[i]:
                if not bool(flags.reshape(-1)[i]):
                    continue
                parameter.grad = self._empty_gradient(parameter)
            grad: Any = stored_grad(parameter)
            _take(codes, values, grad.qdata, GROUP_SIZE)
            _take(scales, groups, grad.scale, 1)
            grad.multiplier.fill_(1.0)
            grad.rounding.exchange()
            if not self._slots[parameter].quantize:
                parameter.grad = grad.dequantize(gradient_dtype(parameter))

    def _parts(self, parameter: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the flat codes and scales of a gradient, zeros if there is none."""
        grad: Any = stored_grad(parameter)
        if grad is None:
            return self._sent.new_zeros(numel), self._sent.new_zeros(numel // GROUP_SIZE)
        # (R, K) -> (R, K rounded up) -> flat; (R, groups) -> flat
        codes = F.pad(grad.qdata, (0, -grad.qdata.shape[1] % GROUP_SIZE))
        return codes.view(-1), grad.scale.view(-1)

    def _rounding(self, parameter: Tensor) -> Rounding:
        grad = stored_grad(parameter)
        slot = self._slots[parameter]
        return grad.rounding if isinstance(grad, Float8Grad) else slot.rounding(parameter)

    def _empty_gradient(self, parameter: Tensor) -> Float8Grad:
        rows, cols = matrix_shape(parameter.shape)
        codes, scales = (self._sent.new_empty((rows, n)) for n in (cols, num_groups(cols)))
        one = torch.ones((), device=parameter.device, dtype=torch.float32)
        parts = GradientParts(codes, scales, one)
        return Float8Grad(parts, parameter.shape, parameter.dtype, self._rounding(parameter))


def _lay_out(pieces: Sequence[Tensor], target: Tensor) -> None:
    """Write the pieces one after another into (N, C), and zeros after them."""
    if len(pieces) > 1 or pieces[0].numel() < target.numel():
        missing = target.numel() - sum(piece.numel() for piece in pieces)
        pieces = [torch.cat([*pieces, pieces[0].new_zeros(missing)])]
    target.copy_(pieces[0].view(target.shape))


def _take(source: Tensor, part: slice, target: Tensor, multiple: int) -> None:
    """Copy `source[part]`, whose rows are padded to `multiple` elements, into `target`."""
    rows, cols = target.shape
    if source.ndim > 1 and source.numel() == target.numel():
        target.view(source.shape).copy_(source)
        return
    # (R, K rounded up)
    padded = source.reshape(-1)[part].view(rows, -(-cols // multiple) * multiple)
    target.copy_(padded[:, :cols])
