"""A line of the report of ``torch-fp8 env``."""

import re
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


_MARKS = {OK: "ok", FAILED: "FAILED", NOT_RUN: "not run", INFO: ""}
_MOST_NAME_WIDTH = 48
MORE = "\ntorch-fp8 env --all prints every line; --self-test tries everything"
"""The end of a brief description."""


def lines(results: Sequence[Result], width: int = 100) -> str:
    """Format `results` as a line each, of at most `width` columns unless a word is longer."""
    parts = []
    for section, members in _sections(results):
        parts.append(f"{section}\n")
        name_width = min(_MOST_NAME_WIDTH, max(len(result.name) for result in members))
        for result in members:
            head = f"  {result.name:<{name_width}} {_MARKS[result.status]:<8}"
            seconds = f" {result.seconds:.1f} s" if result.seconds >= 0.05 else ""
            filled = _filled(f"{result.detail}{seconds}".strip(), max(width, 72), head, " " * 8)
            parts.append(f"{filled.rstrip() or head.rstrip()}\n")
        parts.append("\n")
    return "".join(parts)


def paragraphs(results: Sequence[Result], width: int = 80) -> str:
    """Format `results` as a paragraph for each section, and a line for each failure."""
    parts = []
    for section, members in _sections(results):
        parts.append(section)
        names: dict[str, list[str]] = {}  # detail -> names: several cards share a detail
        for result in members:
            if result.status != FAILED and not result.part:
                names.setdefault(result.detail, []).append(result.name)
        texts = [
            "; ".join(f"{', '.join(of)}: {detail}".rstrip(": ") for detail, of in names.items())
        ]
        texts += [f"FAILED {r.name}: {r.detail}" for r in members if r.status == FAILED]
        parts += [_filled(text, width) for text in filter(None, texts)]
    return "\n".join([*parts, ""])


def _filled(text: str, width: int, first: str = "  ", indent: str = "  ") -> str:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=indent, **options)


def summary(results: Sequence[Result]) -> str:
    """Count the results of each status, in one line."""
    statuses = [result.status for result in results]
    counts = [f"{statuses.count(status)} {status}" for status in (OK, FAILED, NOT_RUN)]
    failed = [r.name for r in results if r.status == FAILED]
    named = f" ({', '.join(failed[:5])}{', ...' if len(failed) > 5 else ''})" if failed else ""
    return f"{', '.join(counts)}{named}"


def _sections(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    sections: dict[str, list[Result]] = {}
    for result in results:
        sections.setdefault(result.section, []).append(result)
    return list(sections.items())
