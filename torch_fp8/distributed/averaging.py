"""The average of a buffer over ranks in 8 bits, in two collectives of messages.

An all-to-all brings each rank the part that it owns from everybody, and an all-gather brings the
average that it made of it to all (`torch_fp8.ops.messages`). Both round to nearest, and all ranks
decode the same bytes. `torch_fp8.distributed.ddp.comm_hook` averages buckets so, and
`torch_fp8.distributed.fsdp.replicas` the shards that FSDP2's replicas have.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.distributed.collectives import all_gather, all_to_all
from torch_fp8.ops import messages
from torch_fp8.ops.alignment import aligned, is_aligned
from torch_fp8.quantization.formats import GROUP_SIZE

_WIRE_DTYPES = (torch.bfloat16, torch.float32)
DTYPES = (*_WIRE_DTYPES, torch.float16)
"""The dtypes that have an 8-bit form on the wire."""

Stages: TypeAlias = Generator[None, None, None]
"""The averaging of a buffer, which stops behind each collective that it has begun."""


class Run(NamedTuple):
    """Neighbours in a buffer that travel in the same form: elements ``start`` to ``stop``."""

    start: int
    stop: int
    in_groups: bool


def average_runs(buffer: Tensor, runs: Sequence[Run], group: Any, factor: float) -> Stages:
    """Replace a buffer by `factor` times its sum over the ranks of a process group.

    Args:
        buffer: (E,), one of `DTYPES`.
        runs: neighbours that cover the buffer; those in groups travel as 8-bit codes, the others as
            BF16. Equal on all ranks.
        group: process group.
        factor: factor of the sum, such as 1 / N.
    """
    ranks = dist.get_world_size(group)
    groups, plain = ([run for run in runs if run.in_groups == kind] for kind in (True, False))
    values, others = _joined(buffer, groups, GROUP_SIZE), _joined(buffer, plain, 1)
    sizes = values.numel(), others.numel()
    layout = messages.split_layout(*sizes, ranks)
    values = values if values.dtype in _WIRE_DTYPES else values.float()
    sent = messages.pack_flat(values, others, layout, ranks)
    del values, others
    received = torch.empty_like(sent)
    work = all_to_all(received, sent, group, async_op=True)
    yield

    work.wait()  # now average the part that this rank owns, and send it to all
    sent, received = messages.reduce_and_repack(received, layout, factor), sent
    work = all_gather(received, sent, group, async_op=True)
    yield

    work.wait()
    values = _target(buffer, groups, sizes[0], _WIRE_DTYPES)
    others = _target(buffer, plain, sizes[1], DTYPES)
    messages.unpack_flat(received, layout, values, others)
    for kind, source, multiple in ((groups, values, GROUP_SIZE), (plain, others, 1)):
        position = 0
        for run in kind:
            size, target = run.stop - run.start, buffer[run.start : run.stop]
            if target.data_ptr() != source.data_ptr():
                target.copy_(source[position : position + size])
            position += -(-size // multiple) * multiple


def _joined(buffer: Tensor, runs: list[Run], multiple: int) -> Tensor:
    """Join runs of a buffer to one flat, aligned tensor; each of several is zero-padded to a
    `multiple` of elements.
    """
    pieces = [buffer[run.start : run.stop] for run in runs]
    if len(pieces) == 1:
        return aligned(pieces[0])
    padded = [F.pad(piece, (0, -piece.numel() % multiple)) for piece in pieces]
    return torch.cat(padded) if padded else buffer.new_empty(0)


def _target(buffer: Tensor, runs: list[Run], numel: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Return where runs are decoded: an aligned one alone in its own place, others in memory for
    all.
    """
    if len(runs) == 1 and buffer.dtype in dtypes:
        place = buffer[runs[0].start : runs[0].stop]
        if is_aligned(place):
            return place
    return buffer.new_empty(numel, dtype=buffer.dtype if buffer.dtype in dtypes else torch.float32)
