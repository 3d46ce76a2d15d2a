"""Agreement of ranks through the store that their process group was created with.

No collective is involved: a rank that never asks could be inside another one, and two versions of
torch may not understand each other's collectives. In `meet`, the ranks of a group wait for each
other and compare descriptions; in `torch_fp8.ops.one_rank` they take the answer of one of them.

A meeting takes a few requests per rank, however many ranks there are. Each rank counts itself, and
the first rank with a description counts and writes it. The last rank that comes ends the meeting,
or, if the time is over, the first rank that notices ends it with a list of missing ranks. Only if
ranks are missing or differ does each rank look for the others and read what they wrote.

`check_same_config` checks at start-up that all ranks run the same configuration and model. A rank
with another level, recipe or version exchanges other tensors than its peers. The collectives then
hang or, worse, succeed with wrong data. The check detects this first, and names the hosts.
"""

import hashlib
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_fp8._version import __version__, distribution_version
from torch_fp8.config import ENV_VAR, FP8Config
from torch_fp8.ops.hardware import card_name
from torch_fp8.ops.one_rank import KEY, default_store
from torch_fp8.quantization.wording import first_of

_SECONDS, _SECONDS_PER_RANK = 120, 1
_WARN_AFTER = 30
"""Seconds after which the first rank that has come warns that it is waiting for others."""
_GRACE = 3
"""Seconds for which rank 0, which may host the store, lets the others read a bad result."""
_MOST_HOSTS = 4


class Rank(NamedTuple):
    """A rank that has come: its number in the default group, its host, and its description."""

    number: int
    host: str
    description: dict[str, str]


def meet(
    description: Mapping[str, str], group: Any, seconds: float | None = None
) -> Sequence[Rank]:
    """Wait for all ranks of a process group; return them if their descriptions differ.

    All ranks must call it the same number of times. Without a store, as with MPI, nothing is
    compared.

    Args:
        description: this rank's description, as names and values.
        group: a process group of several ranks.
        seconds: the time to wait, or None for 120 s plus 1 s per rank, at most `store_timeout`.
    Returns:
        The group's ranks with their descriptions, or nothing if all descriptions are equal.
    Raises:
        ValueError: ranks did not come in time; the message names them.
    """
    store = default_store()
    if store is None or dist.get_backend(group) == "fake":
        return ()
    numbers, own = dist.get_process_group_ranks(group), dist.get_rank()
    if seconds is None:
        seconds = min(_SECONDS + _SECONDS_PER_RANK * len(numbers), store.timeout.total_seconds())
    # Groups that have no rank in common may have the same name.
    meetings = dist.PrefixStore(f"{KEY}/{group.group_name}/{numbers[0]}", store)
    store = dist.PrefixStore(str(number := meetings.add("ended", 0)), meetings)
    digest = hashlib.sha256(json.dumps(dict(description), sort_keys=True).encode()).hexdigest()
    if store.add(f"{digest} given", 1) == 1:
        store.set(digest, json.dumps(dict(description)))
        store.add("descriptions", 1)
    store.set(str(own), json.dumps((own, socket.gethostname(), digest)))

    def end(missing: Sequence[int]) -> None:
        """End this meeting, unless another rank has; a rank that comes later joins the next one."""
        meetings.compare_set("ended", str(number), str(number + 1))
        store.compare_set("missing", "", json.dumps(missing))

    missing = _wait_for_all(store, numbers, seconds, end)
    if not missing and store.add("descriptions", 0) == 1:
        return ()
    came = [str(number) for number in numbers if number not in missing]
    entries = [json.loads(entry) for entry in store.multi_get(came)]
    digests = [] if missing else list({digest for _, _, digest in entries})
    given = dict(zip(digests, map(json.loads, store.multi_get(digests)), strict=True))
    ranks = [Rank(number, host, given.get(digest, {})) for number, host, digest in entries]
    store.add("read", 1)
    if own == 0:
        _poll(lambda: store.add("read", 0) >= len(came), _GRACE)
    if missing:
        raise ValueError(
            f"{format_ranks(missing)} did not enable FP8 while {format_places(ranks)} did, or did "
            f"not get there within {seconds:.0f} s; give all ranks the same script, flags and "
            f"environment ({ENV_VAR} is {description[ENV_VAR]} on this one), and install torch-fp8 "
            "on all hosts"
        )
    return ranks


def _wait_for_all(
    store: Any, numbers: Sequence[int], seconds: float, end: Callable[[Sequence[int]], None]
) -> list[int]:
    """Wait until all ranks have come, or the time is over; return those that are missing."""
    place = store.add("came", 1)
    if place == len(numbers):
        end([])
    before_warning = min(_WARN_AFTER, seconds)
    ended = _poll(lambda: store.check(["missing"]), before_warning)
    if not ended and place == 1 and before_warning < seconds:
        warnings.warn(
            f"FP8 is waiting for {format_ranks(_missing(store, numbers))} to enable it too, for up "
            f"to {seconds:.0f} s",
            stacklevel=2,
        )
    if not _poll(lambda: store.check(["missing"]), seconds - before_warning):
        end(_missing(store, numbers))
    return json.loads(bytes(store.get("missing")))


def _missing(store: Any, numbers: Sequence[int]) -> list[int]:
    """Return the ranks that have not come."""
    return [number for number in numbers if not store.check([str(number)])]


def _poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, and return whether it does in time; Ctrl-C interrupts it."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 1.0)
    return True


def store_timeout() -> float | None:
    """Return the timeout in seconds of the default process group's store, if it has one."""
    store = default_store()
    return None if store is None else store.timeout.total_seconds()


def format_ranks(ranks: Sequence[int]) -> str:
    """Format rank numbers as ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


def format_places(ranks: Sequence[Rank], ranks_alone: bool = False) -> str:
    """Format ranks by host: ``node-1 (ranks 8-15), node-2 (ranks 16-23)``.

    Args:
        ranks: some of the ranks.
        ranks_alone: whether to leave out the host if there is only one.
    """
    if ranks_alone:
        return format_ranks([rank.number for rank in ranks])
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank.number)
    shown = list(hosts.items())[:_MOST_HOSTS]
    text = ", ".join(f"{host} ({format_ranks(numbers)})" for host, numbers in shown)
    more = len(hosts) - len(shown)
    return f"{text} and {more} more hosts" if more else text


_VERSIONS = ("torch-fp8", "torch", "Triton")
_CARD = "the card"


def check_same_config(
    config: FP8Config,
    group: Any = None,
    parts: Mapping[str, str] | None = None,
    absent: str = "missing",
    seconds: float | None = None,
) -> None:
    """Raise on every rank if a process group's ranks differ in configuration, version or model.

    All ranks must call it the same number of times. A rank that does not, because it uses no FP8 or
    another backend, counts as missing when the time is over, and the other ranks raise. Without a
    process group, or with a single rank, the function does nothing. If ranks have different kinds
    of GPU, the group's first rank warns; with recipe ``auto``, which measures one GPU, all ranks
    raise.

    Args:
        config: this rank's configuration.
        group: the process group, or None for the default one.
        parts: a description of each part of the model on this rank, by name.
        absent: the description of a part that a rank does not have.
        seconds: the time to wait for all ranks, or None for ``config.agreement_timeout``.
    Raises:
        ValueError: configurations, parts, or versions of this package, torch or Triton differ (the
            message names the values, and the hosts or ranks that have them); ranks are missing.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    group = group or dist.group.WORLD
    options = {name: repr(value) for name, value in asdict(config).items()}
    triton = distribution_version("triton") or "none"
    versions = dict(zip(_VERSIONS, (__version__, torch.__version__, triton), strict=True))
    variable = "set" if os.environ.get(ENV_VAR) else "not set"
    own = {**versions, _CARD: _card(group), ENV_VAR: variable, **options}
    ranks = meet({**own, **(parts or {})}, group, seconds or config.agreement_timeout)
    differing = _differing(ranks, absent)
    of_versions = [differing.pop(name) for name in _VERSIONS if name in differing]
    of_variable, of_cards = differing.pop(ENV_VAR, None), differing.pop(_CARD, None)
    of_options = [differing.pop(name) for name in options if name in differing]
    if of_versions:
        raise ValueError(
            f"ranks have different versions: {'; '.join(of_versions)}. Install the same versions "
            "on all hosts"
        )
    if of_options:
        hint = f" ({of_variable})" if of_variable else ""
        raise ValueError(
            f"ranks have different FP8Configs: {'; '.join(of_options)}{hint}. Use the same "
            "FP8Config on all ranks"
        )
    if of_cards and config.recipe == "auto" and not config.emulate and config.backend == "torch":
        raise ValueError(
            f"recipe 'auto' measures one kind of card, but {of_cards}. Name a recipe that all of "
            "them support, such as FP8Config(recipe='tensorwise')"
        )
    if differing:
        raise ValueError(
            f"the model differs between ranks: {first_of(list(differing.values()), 3, '; ')}. "
            "Build, convert and shard the same model on all ranks, after init_process_group if the "
            "recipe is 'auto'"
        )
    if of_cards and dist.get_rank(group) == 0:
        warnings.warn(f"the slowest card sets the pace: {of_cards}", stacklevel=2)


def _card(group: Any) -> str:
    """Return the name and compute capability of the GPU that this rank trains on."""
    has_card = "cuda" in dist.get_backend_config(group) and torch.cuda.is_available()
    return card_name(torch.device("cuda" if has_card else "cpu"))


def _differing(ranks: Sequence[Rank], absent: str) -> dict[str, str]:
    """Describe each name whose value differs between ranks: the values, and which ranks have them.

    Args:
        ranks: the ranks with their descriptions.
        absent: the value shown if a rank does not have a name.
    """
    differing = {}
    one_host = len({rank.host for rank in ranks}) == 1
    for name in dict.fromkeys(name for rank in ranks for name in rank.description):
        having: dict[str, list[Rank]] = {}
        for rank in ranks:
            having.setdefault(rank.description.get(name, absent), []).append(rank)
        if len(having) > 1:
            parts = [
                f"{value} on {format_places(some, one_host)}" for value, some in having.items()
            ]
            differing[name] = f"{name} is {', '.join(parts)}"
    return differing
