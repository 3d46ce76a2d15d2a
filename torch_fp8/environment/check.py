"""A check of the self-test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_fp8.environment.result import NotRun, last_line


@dataclass(frozen=True)
class Check:
    """A function to call in a process of its own, and how long it may take.

    Attributes:
        section, name: under which its result is shown.
        function: ``"module:function"``. It returns one line of detail, raises
            `torch_fp8.environment.result.NotRun` where it cannot run, and anything else where
            something is wrong.
        arguments: arguments of the function, which JSON can hold.
        limit_s: seconds after which it has failed; the start of its process does not count.
        not_run: why it cannot run here; empty: it runs.
        is_alone: whether it runs after all others have finished, because it measures times.
        sees_every_card: whether it sees all cards; other checks see the first.
    """

    section: str
    name: str
    function: str
    arguments: tuple[Any, ...] = ()
    limit_s: float = 120.0
    not_run: str = ""
    is_alone: bool = False
    sees_every_card: bool = False


def run_parts(parts: Mapping[str, Callable[[], str]]) -> str:
    """Run all parts of a check and return their details in one line.

    Raises:
        RuntimeError: parts have failed; it names each with its error.
    """
    details, failures = [], []
    for name, part in parts.items():
        try:
            details.append(f"{name}: {part()}")
        except NotRun:
            raise
        except Exception as error:
            failures.append((name, error))
    if failures:
        text = "; ".join(f"{name}: {last_line(error)}" for name, error in failures)
        raise RuntimeError(text) from failures[0][1]
    return "; ".join(details)
