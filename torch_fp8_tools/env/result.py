"""A line of the report of ``torch-fp8 env``."""

import itertools
import re
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from torch_fp8.quantization.recipe import RECIPES

SUBJECTS = ("kernels", *RECIPES, "frozen")
"""The subjects of the self-test, each of which can be requested alone."""
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
        log: a traceback and the printed output.
        part: whether another line summarizes it, so that it is only printed on request.
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


_MARKS = {OK: "ok", FAILED: "FAILED", NOT_RUN: "not run", INFO: ""}
_MOST_NAME_WIDTH = 48


def lines(results: Sequence[Result], width: int = 100) -> str:
    """Format `results` as a line each, of at most `width` columns unless a word is longer."""
    wrapper = textwrap.TextWrapper(
        max(width, 72), subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    text = ""
    for section, members in itertools.groupby(results, lambda result: result.section):
        rows = list(members)
        name_width = min(_MOST_NAME_WIDTH, max(len(result.name) for result in rows))
        text += f"{section}\n"
        for result in rows:
            wrapper.initial_indent = f"  {result.name:<{name_width}} {_MARKS[result.status]:<8}"
            seconds = f" {result.seconds:.1f} s" if result.seconds >= 0.05 else ""
            detail = f"{result.detail}{seconds}".strip()
            text += f"{wrapper.fill(detail) or wrapper.initial_indent}".rstrip() + "\n"
        text += "\n"
    return text


def summary(results: Sequence[Result]) -> str:
    """Count the results of each status, in one line."""
    statuses = [result.status for result in results]
    counts = [f"{statuses.count(status)} {status}" for status in (OK, FAILED, NOT_RUN)]
    failed = [r.name for r in results if r.status == FAILED]
    named = f" ({', '.join(failed[:5])}{', ...' if len(failed) > 5 else ''})" if failed else ""
    return f"{', '.join(counts)}{named}"
