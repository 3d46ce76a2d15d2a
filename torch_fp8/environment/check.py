"""A check of the self-test."""

from dataclasses import dataclass
from typing import Any

EVERY_CARD = "every card"
"""The `Check.process` that sees all cards; the others see the first."""
ALONE = "alone"
"""The `Check.process` that runs after all others have finished: it measures times."""


@dataclass(frozen=True)
class Check:
    """A function to call, with where it runs and how long it may take.

    Attributes:
        section, name: under which its result is shown.
        function: ``"module:function"``. It returns one line of detail, raises
            `torch_fp8.environment.result.NotRun` where it cannot run, and anything else where
            something is wrong.
        arguments: arguments of the function, which JSON can hold.
        process: checks that have the same one follow each other in one process.
        limit_s: seconds after which it has failed.
        not_run: why it cannot run here; empty: it runs.
    """

    section: str
    name: str
    function: str
    arguments: tuple[Any, ...] = ()
    process: str = "engine"
    limit_s: float = 120.0
    not_run: str = ""
