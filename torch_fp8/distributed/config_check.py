"""Checks at the start that all ranks agree on what runs in FP8, before they could wait for ever.

With another level or recipe a rank exchanges other tensors than its peers, and the collectives of
both hang or, worse, do not. `check_same_config` finds that out first: by way of the store that the
process group was made with, that all ranks have come (a rank that does not ask for FP8 never does),
then with a collective of 8 bytes that their configurations are the same; the configurations
themselves travel where they are not. `check_same_parts` does so with the parts of a sharded model.

What is measured differs from rank to rank by itself: `answer_of_one` gives all the same.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    gathered = _different((asdict(config), bool(os.environ.get(ENV_VAR))), asdict(config), group)
    if gathered:
        raise ValueError(_difference(gathered, dist.get_process_group_ranks(group)))


def check_same_parts(parts: Mapping[str, str], group: Any) -> None:
    """Raise on every rank of a process group if their models have different parts.

    All ranks of the group must call it, as often; as `check_same_config`.

    Args:
        parts: name of a part, and what it is on this rank, in words.
        group: process group.
    Raises:
        ValueError: different parts (the message names some, what they are and on which ranks), or
            ranks that have not come.
    """
    if dist.get_world_size(group) == 1 or not can_ask():
        return
    gathered = _different(dict(parts), dict(parts), group)
    if not gathered:
        return
    differing = _differing(gathered, dist.get_process_group_ranks(group), "missing")
    more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise ValueError(
        f"ranks that shard one model have different ones: {'; '.join(differing[:3])}{more}. Build, "
        "convert and shard the same model on all ranks"
    )


def _different(mine: Any, compared: dict[str, Any], group: Any) -> list[Any]:
    """Gather every rank's description of itself; return nothing if `compared` is the same on all.

    Args:
        mine: the description of this rank.
        compared: the part that must agree; 7 bytes of its digest are compared first.
    """
    _wait_for_all(group or dist.group.WORLD)
    digest = hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).digest()[:7]
    number = torch.tensor([int.from_bytes(digest, "big")], device=_device(group))
    every = [torch.empty_like(number) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, number, group=group)
    if len({int(t) for t in every}) == 1:
        return []
    gathered: list[Any] = [None] * len(every)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def answer_of_one(question: str, answer: Callable[[], str]) -> str:
    """Return what `answer` returned on the rank of the default process group that asked first.

    This is no collective: only some ranks may ask, in any order, at any time and repeatedly. A rank
    that comes while the first one finds the answer waits. In a single process, and before there is
    a process group, each answers for itself.

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
    """Return whether this process has other ranks to agree with."""
    initialized = dist.is_available() and dist.is_initialized()
    return initialized and dist.get_world_size() > 1


def can_ask() -> bool:
    """Return whether `answer_of_one` works here: not with MPI, nor with a fake process group."""
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
    """Return the restart count of torchrun, whose store outlives a restart with all that was
    written.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _store() -> Any:
    """Return the default process group's store; None with a backend that has none (MPI)."""
    return dist.distributed_c10d._get_default_store()


def _device(group: Any) -> torch.device:
    """Return the device from which the group's collectives take tensors: the CPU if they can."""
    kinds = [device.type for device in (group or dist.group.WORLD)._device_types]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _difference(gathered: Sequence[tuple[dict[str, Any], bool]], ranks: Sequence[int]) -> str:
    """Describe, for the error, how the ranks differ.

    Args:
        gathered: the options of each of `ranks`, and whether the environment variable is set.
    """
    options = [{k: repr(v) for k, v in those.items()} for those, _ in gathered]
    differing = _differing(options, ranks, _UNKNOWN)
    given = [rank for rank, (_, is_set) in zip(ranks, gathered, strict=True) if is_set]
    hint = f" ({ENV_VAR} is set on {_ranks(given)} only)" if 0 < len(given) < len(ranks) else ""
    said = "; ".join(differing)
    return f"ranks have different FP8Configs: {said}{hint}. Give all ranks the same one"


def _differing(
    gathered: Sequence[Mapping[str, str]], ranks: Sequence[int], absent: str
) -> list[str]:
    """Describe each name that is not the same on all ranks: its values, and on which ranks.

    Args:
        gathered: the description of each of `ranks`.
        absent: the value shown for a name that a rank does not have.
    """
    differing = []
    for name in dict.fromkeys(name for those in gathered for name in those):
        having: dict[str, list[int]] = {}
        for rank, those in zip(ranks, gathered, strict=True):
            having.setdefault(those.get(name, absent), []).append(rank)
        if len(having) > 1:
            parts = [f"{value} on {_ranks(some)}" for value, some in having.items()]
            differing.append(f"{name} is {', '.join(parts)}")
    return differing


def _ranks(ranks: Iterable[int]) -> str:
    """Format rank numbers as ``rank 3`` or ``ranks 0-2, 5``."""
    runs = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    several = len(runs) > 1 or "-" in runs[0]
    return f"{'ranks' if several else 'rank'} {', '.join(runs)}"
