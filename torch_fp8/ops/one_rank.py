"""Answers of one rank for all, through the store that their process group was created with."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

KEY = "torch_fp8/agreement"
"""Prefix of this package's keys in the store."""


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
    store = default_store() if in_several_ranks() else None
    if store is None:
        return answer()
    key = f"{KEY}/{hashlib.sha256(question.encode()).hexdigest()}"
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
    return not in_several_ranks() or (dist.get_backend() != "fake" and default_store() is not None)


def default_store() -> Any:
    """Return the default process group's store, or None if its backend (MPI) has none."""
    world = dist.group.WORLD
    return None if world is None else world.get_group_store()
