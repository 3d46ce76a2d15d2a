"""Agreement of ranks through the store that their process group was created with.

No collective is involved: a rank that never asks could be inside another one, and two versions of
torch may not understand each other's collectives. `compare` tells each rank whether all ranks of a
group gave the same description, and which ranks are missing. `answer_of_one` gives all ranks the
answer of one of them.

A store may outlive the processes that wrote to it, after an elastic restart or in a group that is
initialised again in one process. Each comparison therefore has its own name, created by the rank
that leads it, and only entries under that name count:

1. The leader, rank 0, writes the new name to ``<group>/leader``.
2. Each rank reads the name and writes its own token and digest under it. It writes them again if
   the name changes, because the first name may belong to an earlier comparison.
3. When all ranks have arrived, or after the timeout, the leader writes the result under the name,
   and the name beside each token. A rank that finds a name beside its own token takes the result.

If the leader is missing, the first rank whose timeout expires leads for some seconds.
"""

import hashlib
import json
import os
import socket
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

_KEY = "torch_fp8/agreement"
_SECONDS, _SECONDS_PER_RANK = 120, 1
_WARN_AFTER = 30
"""Seconds after which the leader warns of the ranks that it waits for."""
_GRACE = 3
"""Seconds for which a rank replaces a missing leader; longer than the longest poll."""
_epochs: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()
"""The name of the first comparison in each process group."""


class Rank(NamedTuple):
    """A rank that has arrived: its number in the default group, its host, and a note."""

    number: int
    host: str
    note: str = ""


class NotAllCame(Exception):
    """Raised if some ranks are missing.

    Attributes:
        missing: the missing ranks' numbers in the default group.
        came: the ranks that have arrived.
        seconds: the time that they were waited for.
    """

    def __init__(self, missing: Sequence[int], came: Sequence[Rank], seconds: float) -> None:
        super().__init__(list(missing))
        self.missing, self.came, self.seconds = list(missing), list(came), seconds


class Compared(NamedTuple):
    """The ranks of a group, and the description that each of them gave."""

    ranks: list[Rank]
    descriptions: list[dict[str, str]]


def compare(
    description: Mapping[str, str], group: Any, seconds: float | None = None, note: str = ""
) -> Compared | None:
    """Compare the descriptions of all ranks of a process group; return None if they are equal.

    All ranks must call it the same number of times. Without a store, as with MPI, nothing is
    compared. Ranks compare digests and exchange the
    descriptions only if the digests differ.

    Args:
        description: this rank's description, as names and values.
        group: a process group of several ranks.
        seconds: the time to wait for all ranks; None: 120 and 1 more for each rank of the group, or
            the timeout of the process group if that is shorter.
        note: a text in this rank's `Rank`, not compared.
    Raises:
        NotAllCame: ranks did not arrive in time.
    """
    store = _store()
    if store is None or dist.get_backend(group) == "fake":
        return None
    if seconds is None:
        own = _SECONDS + _SECONDS_PER_RANK * dist.get_world_size(group)
        seconds = min(own, store.timeout.total_seconds())
    text = json.dumps(dict(description))
    name, result = _Meeting(store, group, seconds, text, note).hold()
    _epochs.setdefault(group, name)
    came = [Rank(*rank) for rank in result["came"]]
    if result["missing"]:
        raise NotAllCame(result["missing"], came, seconds)
    if not result["texts"]:
        return None
    given = {digest: json.loads(text) for digest, text in result["texts"].items()}
    return Compared(came, [given[digest] for digest in result["digests"]])


class _Meeting:
    """One comparison, as one rank takes part in it; see the module's docstring.

    Args:
        store: the store of the default process group.
        group: the process group.
        seconds: the time to wait for all ranks.
        text: this rank's description.
        note: this rank's `Rank` as text.
    """

    def __init__(self, store: Any, group: Any, seconds: float, text: str, note: str) -> None:
        self._store, self._text = store, text
        self._numbers = dist.get_process_group_ranks(group)
        self._index, self._seconds = dist.get_rank(group), seconds
        of_group = hashlib.sha256(repr(self._numbers).encode()).hexdigest()[:16]
        self.leader_key = f"{_KEY}/{group.group_name}/{of_group}/leader"
        self._own = f"{_KEY}/{uuid.uuid4().hex}"  # this rank's token; also the name, if it leads
        in_order = json.dumps(json.loads(text), sort_keys=True)
        self._digest = hashlib.sha256(in_order.encode()).hexdigest()[:16]
        about = (self._digest, self._own, (self._numbers[self._index], socket.gethostname(), note))
        self._about = json.dumps(about)

    def hold(self) -> tuple[str, dict[str, Any]]:
        """Wait for the result; return the comparison's name and its result."""
        begin = time.monotonic()
        deadline, warn_at, pause = begin + self._seconds, begin + _WARN_AFTER, 0.002
        registered = ""
        if self._index == 0:
            self._store.set(self.leader_key, self._own)
        else:
            deadline += _GRACE / 2  # the leader times out first
        while True:
            leader = self._leader()
            # A leader writes this result before it starts the next comparison.
            if self._store.check([f"{self._own}/result in"]):
                break
            if leader and leader != registered:
                self._register(leader)
                if registered:  # another rank, or this one, has taken over and needs time
                    more = _GRACE if leader == self._own else 2 * _GRACE
                    deadline = max(deadline, time.monotonic() + more)
                registered, pause = leader, 0.002
            late = time.monotonic() > deadline
            if leader == self._own:
                if late or self._store.check(self._places(leader)):
                    self._conclude(leader)
                    continue
                if time.monotonic() > warn_at:
                    self._warn(leader, deadline - begin)
                    warn_at = deadline
            elif late:
                self._store.compare_set(self.leader_key, leader, self._own)
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)
        name = bytes(self._store.get(f"{self._own}/result in")).decode()
        result = json.loads(bytes(self._store.get(f"{name}/result")))
        if result["came"]:
            self._stay(name, len(result["came"]))
        return name, result

    def _stay(self, name: str, came: int) -> None:
        """Let all ranks read a bad result before the leader, which may host the store, exits."""
        self._store.add(f"{name}/read", 1)
        deadline = time.monotonic() + (_GRACE if self._index == 0 else 0)
        while time.monotonic() < deadline and self._store.add(f"{name}/read", 0) < came:
            time.sleep(0.02)

    def _leader(self) -> str:
        """Return the name of the current or of an earlier comparison; empty if there is none."""
        if not self._store.check([self.leader_key]):
            return ""
        return bytes(self._store.get(self.leader_key)).decode()

    def _register(self, name: str) -> None:
        if not self._store.check([f"{name}/{self._digest}"]):
            self._store.set(f"{name}/{self._digest}", self._text)
        self._store.set(f"{name}/{self._index}", self._about)

    def _places(self, name: str) -> list[str]:
        return [f"{name}/{index}" for index in range(len(self._numbers))]

    def _came(self, name: str) -> list[bool]:
        return [self._store.check([place]) for place in self._places(name)]

    def _conclude(self, name: str) -> None:
        """Write the result for the ranks that have arrived."""
        came = self._came(name)
        keys = [place for place, has in zip(self._places(name), came, strict=True) if has]
        abouts = [json.loads(bytes(self._store.get(key))) for key in keys]
        digests = [digest for digest, _, _ in abouts]
        missing = [n for n, has in zip(self._numbers, came, strict=True) if not has]
        distinct = [] if missing else list(dict.fromkeys(digests))
        texts = {d: bytes(self._store.get(f"{name}/{d}")).decode() for d in distinct}
        result: dict[str, Any] = {"missing": missing, "texts": {}, "came": []}
        if missing or len(texts) > 1:
            result["came"] = [rank for _, _, rank in abouts]
            result |= {"digests": digests, "texts": texts}
        self._store.set(f"{name}/result", json.dumps(result))
        for _, token, _ in abouts:
            self._store.set(f"{token}/result in", name)

    def _warn(self, name: str, seconds: float) -> None:
        came = self._came(name)
        missing = [n for n, has in zip(self._numbers, came, strict=True) if not has]
        warnings.warn(
            f"FP8 is waiting for {format_ranks(missing)} to enable it too, for up to {seconds:.0f} "
            "s",
            stacklevel=2,
        )


def answer_of_one(question: str, answer: Callable[[], str]) -> str:
    """Return the result of `answer` on the first rank of the default process group that asks.

    This is not a collective: some of the ranks may ask, in any order, at any time and repeatedly.
    Other ranks wait while the first one computes the answer. In a single process, and before a
    process group exists, each process computes its own answer.

    Args:
        question: a name for the question, equal on all ranks that share the answer.
        answer: the function that computes the answer; only the first rank calls it.
    Raises:
        RuntimeError: the first rank has not answered within the process group's timeout.
    """
    store = _store() if in_several_ranks() else None
    if store is None:
        return answer()
    # If nothing was compared before, torchrun's restart count distinguishes restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    epoch = _epochs.get(dist.group.WORLD) or f"{_KEY}/{attempt}"
    key = f"{epoch}/{hashlib.sha256(question.encode()).hexdigest()}"
    if store.add(f"{key}/asked", 1) == 1:
        store.set(f"{key}/answer", said := answer())
        return said
    try:
        store.wait([f"{key}/answer"])
    except RuntimeError as error:  # DistStoreError after a timeout
        raise RuntimeError(
            "this rank waits for a measurement that another rank did not finish within the timeout "
            "of the process group; look for that rank's error, or set FP8Config(recipe=...), which "
            "needs no measurement"
        ) from error
    return bytes(store.get(f"{key}/answer")).decode()


def in_several_ranks() -> bool:
    """Return whether this process trains together with other ranks."""
    initialized = dist.is_available() and dist.is_initialized()
    return initialized and dist.get_world_size() > 1


def can_ask() -> bool:
    """Return whether `answer_of_one` works here; it doesn't with MPI or a fake process group."""
    return not in_several_ranks() or (dist.get_backend() != "fake" and _store() is not None)


def store_timeout() -> float | None:
    """Return the timeout of the default process group's store in seconds; None without a store."""
    store = _store()
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


def _store() -> Any:
    """Return the default process group's store; None if its backend (MPI) has none."""
    world = dist.group.WORLD
    return None if world is None else world.get_group_store()
