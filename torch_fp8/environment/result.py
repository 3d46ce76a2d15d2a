"""A line of what ``torch-fp8 env`` reports."""

import re
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass

INFO, OK, FAILED, NOT_RUN = "info", "ok", "failed", "not run"
_MAX_MESSAGE = 300


@dataclass(frozen=True)
class Result:
    """What was found out about one thing.

    Attributes:
        section: under which it is shown.
        name: the name of the thing.
        status: `INFO`, `OK`, `FAILED` or `NOT_RUN`.
        detail: one line.
        seconds: the time that it took, in seconds; 0 if it was not measured.
        log: a traceback and what was printed, for the report.
        part: whether another line sums it up; the brief list leaves it out then, unless it failed.
    """

    section: str
    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    log: str = ""
    part: bool = False

    def as_dict(self) -> dict[str, str | float]:
        """Return the fields for JSON."""
        fields = asdict(self)
        del fields["part"]
        return fields


class NotRun(Exception):
    """A check cannot run here and says why, though nothing is wrong."""


def exit_status(results: Iterable[Result]) -> int:
    """Return 1 if anything failed, else 0."""
    return int(any(result.status == FAILED for result in results))


def last_line(error: BaseException) -> str:
    """Return the type of an exception and its message, in one line that is not too long."""
    text = traceback.format_exception_only(type(error), error)[-1]
    return one_line(text)


def one_line(text: str) -> str:
    """Return the text without line ends and control characters, cut off where it is too long."""
    text = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text)).strip()
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}..."
