"""A line of the report of ``torch-fp8 env``."""

import re
import traceback
from dataclasses import dataclass

INFO, OK, FAILED, NOT_RUN = "info", "ok", "failed", "not run"
_MAX_MESSAGE = 300


@dataclass(frozen=True)
class Result:
    """The result of one check or description.

    Attributes:
        section: the section of the report.
        name: the name of the subject.
        status: `INFO`, `OK`, `FAILED` or `NOT_RUN`.
        detail: one line of text.
        seconds: the duration in seconds; 0 if it was not measured.
        log: a traceback and the printed output, for the report.
        part: whether another line summarizes it; the brief list then omits it, unless it failed.
    """

    section: str
    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    log: str = ""
    part: bool = False


def last_line(error: BaseException) -> str:
    """Return the type and message of an exception in one line, shortened if it is too long."""
    text = traceback.format_exception_only(type(error), error)[-1]
    return one_line(text)


def one_line(text: str) -> str:
    """Return the text without line ends and control characters, shortened if it is too long."""
    text = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text)).strip()
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}..."
