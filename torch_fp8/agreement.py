"""Ranks that do not agree on what runs in FP8 are told at the start, before they wait for ever.

With another level or recipe a rank exchanges other tensors than its peers, and the collectives of
both hang or, worse, do not. `check_same_config` finds that out first: by way of the store that the
process group was made with, that all ranks have come (a rank that does not ask for FP8 never does),
then with a collective of 8 bytes that their configurations are the same; the configurations
themselves travel where they are not.

What is measured differs from rank to rank by itself: `answer_of_one` gives all the same.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from torch_fp8.config import ENV_VAR, FP8Config

_KEY = "torch_fp8/agreement"
_UNKNOWN = "no option"


def check_same_config(config: FP8Config, group: Any = None) -> None:
    """Raise on every rank if the ranks of a process group have different configurations.

    All ranks must call it, as often. One that does not, because it asks for no FP8 or for another
    backend's, is found missing after the timeout of the process group, as with any collective: then
    the others raise. Without a process group, and in one of a single rank, it does nothing.

    Args:
        config: this rank's.
        group: process group; None: the default one.
    Raises:
        ValueError: different configurations (the message names the fields, the values and the
            ranks that have them), or ranks that have not come.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    _wait_for_all(group or dist.group.WORLD)
    options = asdict(config)
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).digest()[:7]
    mine = torch.tensor([int.from_bytes(digest, "big")], device=_device(group))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    if len({int(t) for t in every}) == 1:
        return
    gathered: list[Any] = [None] * len(every)
    dist.all_gather_object(gathered, (options, bool(os.environ.get(ENV_VAR))), group=group)
    raise ValueError(_difference(gathered, dist.get_process_group_ranks(group)))


def answer_of_one(question: str, answer: Callable[[], str]) -> str:
    """What `answer` returned on the rank of the default process group that asked first.

    No collective: the ranks that ask may be some of them, and come in any order, at any time and
    repeatedly. Who comes while the first one is at it waits. In a single process, and before there
    is a process group, each answers for itself.

    Args:
        question: what ranks that are to have the same answer have in common.
        answer: called here or not at all.
    Raises:
        RuntimeError: the first one has not answered within the timeout of the process group.
    """
    store = _store() if in_several_ranks() else None
    if store is None:
        return answer()
    key = f"{_KEY}/{_attempt()}/{hashlib.sha256(question.encode()).hexdigest()}"
    if store.add(f"{key}/asked", 1) == 1:
        store.set(f"{key}/answer", said := answer())
        return said
    try:
        store.wait([f"{key}/answer"])
    except RuntimeError as error:  # DistStoreError, in a timeout
        raise RuntimeError(
            "another rank was to measure what this one waits for, and has not finished within the "
            "timeout of the process group; look for its error, or name FP8Config(recipe=...), "
            "with which nothing is measured"
        ) from error
    return bytes(store.get(f"{key}/answer")).decode()


def in_several_ranks() -> bool:
    """Whether this process has others to agree with."""
    initialized = dist.is_available() and dist.is_initialized()
    return initialized and dist.get_world_size() > 1


def can_ask() -> bool:
    """Whether `answer_of_one` can give all ranks the same; not with MPI, nor with a fake group."""
    return not in_several_ranks() or (dist.get_backend() != "fake" and _store() is not None)


def _wait_for_all(group: Any) -> None:
    """Raise ValueError with the ranks that have not come within the timeout.

    Through the store, not a barrier, which would meet whatever collective such a rank is in.
    """
    store = _store()
    if store is None:
        return
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    prefix = f"{_KEY}/{_attempt()}/{group.group_name}"
    turn = store.add(f"{prefix}/turn of {rank}", 1)
    if store.add(f"{prefix}/{turn}/count", 1) == size:
        store.set(f"{prefix}/{turn}/all", "")
    try:
        store.wait([f"{prefix}/{turn}/all"])
    except RuntimeError as error:  # DistStoreError, in a timeout
        ranks = dist.get_process_group_ranks(group)
        came = [store.add(f"{prefix}/turn of {i}", 0) >= turn for i in range(size)]
        if all(came):
            raise
        missing = _ranks(rank for rank, has in zip(ranks, came, strict=True) if not has)
        others = _ranks(rank for rank, has in zip(ranks, came, strict=True) if has)
        raise ValueError(
            f"{missing} did not ask for FP8 while {others} did, or did not come in time; give all "
            "ranks the same script, flags and environment "
            f"({ENV_VAR} is {'' if os.environ.get(ENV_VAR) else 'not '}set on this one)"
        ) from error


def _attempt() -> str:
    """torchrun's store outlives a restart, with what was written before it."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _store() -> Any:
    """Of the default process group; None with a backend that has none (MPI)."""
    return dist.distributed_c10d._get_default_store()


def _device(group: Any) -> torch.device:
    """Where the group's collectives take their tensors: the CPU if it can."""
    kinds = [device.type for device in (group or dist.group.WORLD)._device_types]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _difference(gathered: Sequence[tuple[dict[str, Any], bool]], ranks: Sequence[int]) -> str:
    """What the error says.

    Args:
        gathered: of each of `ranks`, its options and whether the environment variable is set.
    """
    differing = []
    for name in dict.fromkeys(name for options, _ in gathered for name in options):
        having: dict[str, list[int]] = {}
        for rank, (options, _) in zip(ranks, gathered, strict=True):
            value = repr(options[name]) if name in options else _UNKNOWN
            having.setdefault(value, []).append(rank)
        if len(having) > 1:
            parts = [f"{value} on {_ranks(those)}" for value, those in having.items()]
            differing.append(f"{name} is {', '.join(parts)}")
    given = [rank for rank, (_, is_set) in zip(ranks, gathered, strict=True) if is_set]
    hint = f" ({ENV_VAR} is set on {_ranks(given)} only)" if 0 < len(given) < len(ranks) else ""
    said = "; ".join(differing)
    return f"ranks have different FP8Configs: {said}{hint}. Give all ranks the same one"


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    runs = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    several = len(runs) > 1 or "-" in runs[0]
    return f"{'ranks' if several else 'rank'} {', '.join(runs)}"
