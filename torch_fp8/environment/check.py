"""A check of the self-test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_fp8.environment.result import NotRun, last_line


@dataclass(frozen=True)
class Check:
    """A function to call in its own process, with a time limit.

    Attributes:
        section, name: the section and the name of its result.
        function: ``"module:function"``. It returns one line of detail, raises
            `torch_fp8.environment.result.NotRun` if it cannot run here, and any other exception if
            the check fails.
        arguments: the arguments of the function, in JSON types.
        limit_s: the seconds after which it fails; the start of its process does not count.
        not_run: the reason why it cannot run here; empty if it can.
        is_alone: whether it runs after all others have finished, because it measures times.
        sees_every_card: whether it sees all GPUs; other checks see only the first.
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
        RuntimeError: parts have failed; the message has each part's error.
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
