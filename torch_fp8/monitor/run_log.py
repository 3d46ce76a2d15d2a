"""The file of a run's statistics: rank zero appends one JSON object per line.

    {"format": "torch-fp8 monitor", "version": 1, "since": 0, "names": [...], "config": {...}}
    {"step": 10, "values": [...], "losses": [[1, 4.2], ...]}
    {"step": 12, "event": "fallback", "what": "...", "layer": "..."}

A line with names gives the names of the values in later lines. A run that resumes from a checkpoint
appends to the file, beginning with a line whose ``since`` is the step of the checkpoint; earlier
entries for later steps no longer count. A truncated last line is ignored.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE_NAME = "fp8_monitor.jsonl"
FORMAT, VERSION = "torch-fp8 monitor", 1


class RunLog:
    """Writes a run's statistics into a folder; the file is created with its first entry.

    Args:
        folder: the folder of the run.
        names: the names of the values.
        config: the configuration to show with them.
        model: the model's name if a run trains several.
    Attributes:
        since: the step from which the run resumed, until something is written.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], config: Mapping[str, Any], model: str = ""
    ) -> None:
        self.path = folder / (f"fp8_monitor_{model}.jsonl" if model else FILE_NAME)
        self._header = {
            "format": FORMAT,
            "version": VERSION,
            "names": list(names),
            "config": dict(config),
        }
        self.since = 0
        self._begun = False

    def write(self, step: int, **what: Any) -> None:
        """Append one line.

        Args:
            step: the step of the run.
            what: fields of the line; numbers are written with four digits, non-finite ones as null
                or text.
        """
        lines = [_line({"step": step, **what})]
        if not self._begun:
            self._begun = True
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines.insert(0, _line({**self._header, "since": self.since}))
            if self.path.exists():
                lines.insert(0, "")  # ends a line that was cut off
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


_CONSTANTS = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}


def _line(value: Any) -> str:
    """Return a value as JSON, with rounded numbers, and without constants that are not JSON."""
    exact = json.dumps(value)
    value = json.loads(exact, parse_float=_rounded, parse_constant=_CONSTANTS.__getitem__)
    return json.dumps(value, separators=(",", ":"))


def _rounded(number: str) -> float:
    return float(f"{float(number):.5g}")
