"""What of a checkpointed region has to run again in backward, from a trace of its operators.

A tensor is needed if autograd saves it, or if an operator that runs again reads it. An operator
runs again if it makes or writes something needed that was not kept. The trace is walked backwards;
what it knows of tensors is their storage, so that views and writes in place come out right.

Kept are the needed results of operators that cast to FP8, and of attention. Not kept is what a cast
makes of nothing but what is there anyway: parameters, the region's inputs, and what such casts have
made (weights; the first norm of a block, whose input the checkpoint holds). It runs again.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

Signature = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and dtypes of the tensor arguments of an operator."""


class Kind(Enum):
    """How an operator may be treated in the second pass."""

    PLAIN = "runs if something that it makes or writes is needed"
    FORCED = "always runs: it draws random numbers, or returns or takes what is no plain tensor"
    VIEW = "reads nothing"
    KEPT = "what is needed of its results is kept"
    CHEAP = "as PLAIN, but single numbers that it returns are kept"
    HISTORY = "as CHEAP; a history of delayed scaling decides, as it was in the first pass"


@dataclass(frozen=True)
class Result:
    """A tensor that an operator returned.

    Attributes:
        storage: its number in the trace.
        size, stride, dtype, device: its own.
        argument: which of the operator's tensor arguments it is, of one that writes in place.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    argument: int | None = None


@dataclass
class Operation:
    """One operator of the first pass.

    Attributes:
        func: the operator.
        signature: see there.
        reads, writes: storages of the arguments whose values it reads, and that it writes in place.
        results: None for what is no tensor.
        container: tuple or list, of an operator that returns several.
        kind: see there.
    """

    func: Any
    signature: Signature
    reads: frozenset[int]
    writes: frozenset[int]
    results: list[Result | None]
    container: type | None
    kind: Kind


@dataclass
class Trace:
    """What a region did in its first pass.

    Attributes:
        operations: in order.
        saved: storages that autograd saved, by the number of operations before it did.
        opaque: the number of operations whose results may have been read without an operator that
            tells of it, by a kernel launched past torch.
    """

    operations: list[Operation] = field(default_factory=list)
    saved: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    opaque: int = 0


@dataclass
class Plan:
    """What to do in the second pass.

    Attributes:
        runs: of each operation, whether it runs.
        keeps: ``(operation, result)`` of what is to be kept.
    """

    runs: list[bool]
    keeps: set[tuple[int, int]]


def make_plan(trace: Trace) -> Plan:
    """Decide for each operation; see the module."""
    needed: set[int] = set()
    plan = Plan([False] * len(trace.operations), set())
    for i in reversed(range(len(trace.operations))):
        operation, everything = trace.operations[i], i < trace.opaque
        needed |= trace.saved.get(i + 1, set())
        if operation.kind is Kind.VIEW:
            continue
        wanted = {
            j: r
            for j, r in enumerate(operation.results)
            if r is not None and (everything or r.storage in needed)
        }
        kept = {j for j, r in wanted.items() if _is_kept(operation.kind, r)}
        if operation.kind is Kind.HISTORY and wanted:
            kept |= {j for j, r in enumerate(operation.results) if r is not None and not r.size}
        plan.keeps |= {(i, j) for j in kept}
        needed -= {wanted[j].storage for j in kept if j in wanted}
        to_run = len(wanted) > len(kept & wanted.keys()) or bool(operation.writes & needed)
        everything = everything and operation.kind is not Kind.KEPT and not kept
        if to_run or everything or operation.kind is Kind.FORCED:
            plan.runs[i] = True
            needed -= {r.storage for r in wanted.values()}
            needed |= operation.reads | operation.writes
    return plan


def _is_kept(kind: Kind, result: Result) -> bool:
    return kind is Kind.KEPT or (kind in (Kind.CHEAP, Kind.HISTORY) and not result.size)
