"""The average of a buffer over ranks in 8 bits, with two collectives of messages.

An all-to-all sends each rank the part that it owns from all ranks, and an all-gather sends the
average of that part to all ranks (`torch_fp8.ops.messages`). Both round to nearest, and all ranks
decode the same bytes. `torch_fp8.distributed.ddp.buckets` averages DDP's buckets this way, and
`torch_fp8.distributed.fsdp.reduce_scatter` the shards of FSDP2's replicas.

Messages are uint8, because gloo has no float8 and no backend needs to understand them. The receiver
reduces them in float32 (`torch_fp8.ops.messages`).
"""

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.ops import messages
from torch_fp8.ops.gemm_operand import aligned, is_aligned
from torch_fp8.quantization.formats import GROUP_SIZE

# torch 2.13 renamed both; the old names warn there.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather every rank's `input` on every rank, in rank order.

    Args:
        output: contiguous, world size times as many elements as `input`.
        input: contiguous, the same number of elements on every rank.
        group: the process group, or None for the default one.
        async_op: whether to return at once, with a ``Work`` to wait for.
    """
    return _all_gather(output.view(-1), input.view(-1), group=group, async_op=async_op)


def reduce_scatter(output: Tensor, input: Tensor, group: Any = None) -> Any:
    """Sum part r of every rank's `input` on rank r, in the tensors' dtype.

    Args:
        output: contiguous.
        input: contiguous, world size times as many elements as `output`.
        group: see `all_gather`.
    """
    return _reduce_scatter(output.view(-1), input.view(-1), group=group)


def all_to_all(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Send part r of `input` to rank r, and receive part r of `output` from it.

    Args:
        output, input: contiguous, with the same number of elements on every rank, a multiple of the
            world size.
        group, async_op: see `all_gather`.
    """
    return dist.all_to_all_single(output.view(-1), input.view(-1), group=group, async_op=async_op)


class CommunicationStream:
    """A CUDA stream for communication, created when the first CUDA tensor arrives."""

    _stream: Any = None

    def beside(self, device: torch.device) -> Any:
        """Queue CUDA work on this stream in this context, after the computation so far."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make later computation wait for the work that is queued on this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


WIRE_DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes to which 8-bit codes are decoded."""
DTYPES = (*WIRE_DTYPES, torch.float16)
"""The dtypes that can be encoded in 8 bits."""

Stages: TypeAlias = Generator[None, None, None]
"""The averaging of a buffer, as a generator that pauses after it has issued each collective."""


class Run(NamedTuple):
    """Neighbours in a buffer that travel in the same form: elements ``start`` to ``stop``."""

    start: int
    stop: int
    in_groups: bool


def runs_of(pieces: Iterable[tuple[int, int, bool]]) -> list[Run]:
    """Join adjacent pieces of a buffer, (start, numel, whether in groups), that have the same form.

    Only the last piece of a run in groups may end within a group of 32.
    """
    runs: list[Run] = []
    for start, numel, in_groups in pieces:
        run = Run(start, start + numel, in_groups)
        last = runs[-1] if runs else None
        whole = last is not None and (not in_groups or (last.stop - last.start) % GROUP_SIZE == 0)
        if last is not None and last.in_groups == in_groups and last.stop == start and whole:
            runs[-1] = Run(last.start, run.stop, in_groups)
        else:
            runs.append(run)
    return runs


def by_form(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs in groups of 32, and the other runs."""
    return [run for run in runs if run.in_groups], [run for run in runs if not run.in_groups]


def average_runs(buffer: Tensor, runs: Sequence[Run], group: Any, factor: float) -> Stages:
    """Replace a buffer by `factor` times its sum over the ranks of a process group.

    Args:
        buffer: (E,), one of `DTYPES`.
        runs: consecutive runs that cover the buffer, equal on all ranks; those in groups travel as
            8-bit codes, the others as BF16.
        group: the process group, of N ranks.
        factor: the factor of the sum, for example 1 / N.
    """
    ranks = dist.get_world_size(group)
    groups, plain = by_form(runs)
    values, others = joined(buffer, groups, GROUP_SIZE), joined(buffer, plain, 1)  # both flat
    sizes = values.numel(), others.numel()
    layout = messages.split_layout(*sizes, ranks)
    values = values if values.dtype in WIRE_DTYPES else values.float()
    sent = messages.pack_flat(values, others, layout, ranks)
    del values, others
    received = torch.empty_like(sent)  # (N, B) bytes: row r is rank r's
    work = all_to_all(received, sent, group, async_op=True)
    yield

    work.wait()  # now average the part that this rank owns, and send it to all
    sent, received = messages.reduce_and_repack(received, layout, factor), sent
    work = all_gather(received, sent, group, async_op=True)  # (1, B) of each -> (N, B)
    yield

    work.wait()
    values = target_of(buffer, groups, sizes[0], WIRE_DTYPES)
    others = target_of(buffer, plain, sizes[1], DTYPES)
    messages.unpack_flat(received, layout, values[0], others[0])
    copy_back(buffer, groups, *values, GROUP_SIZE)
    copy_back(buffer, plain, *others, 1)


def joined(buffer: Tensor, runs: list[Run], multiple: int) -> Tensor:
    """Join runs of a buffer (..., E) into one aligned tensor.

    If there are several runs, each is zero-padded to a `multiple` of elements.
    """
    pieces = [buffer[..., run.start : run.stop] for run in runs]
    if len(pieces) == 1:
        return aligned(pieces[0])
    padded = [F.pad(piece, (0, -piece.shape[-1] % multiple)) for piece in pieces]
    return torch.cat(padded, -1) if padded else buffer[..., :0]  # (..., sum of the padded runs)


def target_of(
    buffer: Tensor, runs: list[Run], numel: int, dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor, bool]:
    """Return the tensor into which runs are decoded, and whether it is their place in the buffer.

    A single aligned run without padding is decoded in place, several runs into one temporary
    tensor.
    """
    if len(runs) == 1 and buffer.dtype in dtypes:
        place = buffer[runs[0].start : runs[0].stop]
        if is_aligned(place) and place.numel() == numel:
            return place, True
    dtype = buffer.dtype if buffer.dtype in dtypes else torch.float32
    return buffer.new_empty(numel, dtype=dtype), False


def copy_back(
    buffer: Tensor, runs: list[Run], source: Tensor, is_in_place: bool, multiple: int
) -> None:
    """Copy decoded runs, each padded to a `multiple` of elements, to their places in the buffer."""
    position = 0
    for run in () if is_in_place else runs:
        size = run.stop - run.start
        buffer[run.start : run.stop] = source[position : position + size]
        position += -(-size // multiple) * multiple
