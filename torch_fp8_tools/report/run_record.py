"""`RunRecord`: a run's statistics, read from the file that `torch_fp8.monitor.run_log` wrote."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_fp8.monitor.run_log import FILE_NAME, FORMAT, VERSION


class RunRecord:
    """A run's statistics, read from its file.

    Attributes:
        path: the path of the file.
        config: the configuration of the run, as last written.
        steps: the measured steps, rising.
        values: values by name and step.
        losses: losses by step.
        events: the events in the order of their steps; each has ``step``, ``event`` and ``what``.
        notes: sentences on problems of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        self.values: dict[str, dict[int, float]] = {}
        self.losses: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._names: list[str] = []

    @property
    def steps(self) -> list[int]:
        return sorted({step for values in self.values.values() for step in values})

    def absences(self) -> list[tuple[str, int, float]]:
        """Return (layer, first step, last step) of each time that a layer was out of FP8.

        The last step is infinite if the layer was out of FP8 at the end.
        """
        since: dict[str, int] = {}
        absences: list[tuple[str, int, float]] = []
        for event in self.events:
            layer = str(event.get("layer", ""))
            if event["event"] == "fallback":
                since[layer] = int(event["step"])
            elif event["event"] == "return" and layer in since:
                absences.append((layer, since.pop(layer), int(event["step"])))
        return absences + [(layer, first, math.inf) for layer, first in since.items()]

    def take(self, line: Mapping[str, Any]) -> None:
        """Read one line of the file.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the line is not valid.
        """
        if "names" in line:
            if line["format"] != FORMAT:
                raise ValueError(f"a file of format {line['format']!r}")
            if line["version"] != VERSION:
                self.notes.append(
                    f"The file has version {line['version']} of this format, but this is version "
                    f"{VERSION}: only what both have in common is drawn."
                )
            self._names, self.config = list(line["names"]), dict(line.get("config", {}))
            self._forget(int(line.get("since", line.get("step", 1) - 1)))
            return
        step = int(line["step"])
        self.losses |= {int(s): _number(v) for s, v in line.get("losses", ())}
        if "event" in line:
            self.events.append(dict(line))
        if "values" not in line:
            return
        for name, value in zip(self._names, line["values"], strict=True):
            if value is not None:
                self.values.setdefault(name, {})[step] = _number(value)

    def _forget(self, since: int) -> None:
        """Drop the entries after a step from which the run has resumed."""
        begun = bool(self.losses or self.values or self.events)
        self.losses = {step: v for step, v in self.losses.items() if step <= since}
        self.events = [event for event in self.events if event["step"] <= since]
        for name, values in list(self.values.items()):
            self.values[name] = {step: v for step, v in values.items() if step <= since}
        self.values = {name: values for name, values in self.values.items() if values}
        if begun and not (self.losses or self.values or self.events):
            self.notes.append("The file begins with an earlier run, which is not drawn.")


def read_run(run: Path) -> RunRecord:
    """Read the statistics of a run.

    Args:
        run: the run's folder, a folder with exactly one such file below it, or the file itself.
    Raises:
        FileNotFoundError: the folder does not exist, or has no statistics.
        ValueError: there are several runs below it, or the file cannot be read.
    """
    record = RunRecord(_find(run))
    bad = []
    text = record.path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record.take(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError):
            bad.append(number)
    if bad == [len(lines)] and not text.endswith("\n"):
        record.notes.append("The last line was cut off, as when a run is stopped; it is ignored.")
    elif bad:
        shown = ", ".join(map(str, bad[:5])) + (" and more" if len(bad) > 5 else "")
        record.notes.append(f"{len(bad)} of {len(lines)} lines cannot be read (lines {shown}).")
    if not (record.values or record.losses or record.events):
        raise ValueError(f"{record.path} holds no readable statistics")
    record.events.sort(key=lambda event: event["step"])
    others = sorted(path.name for path in record.path.parent.glob("fp8_monitor_*.jsonl"))
    if others and record.path.name == FILE_NAME:
        record.notes.append(
            "The run trained several models. This is the first one; the files of the others are "
            f"{', '.join(others)}."
        )
    return record


def _find(run: Path) -> Path:
    if run.is_file():
        return run
    if not run.is_dir():
        raise FileNotFoundError(f"{run} is neither a folder nor a file")
    if (run / FILE_NAME).is_file():
        return run / FILE_NAME  # the first model's, if there are several
    paths = sorted(run.rglob(FILE_NAME))
    if not paths:
        raise FileNotFoundError(
            f"{run} holds no statistics: there is no {FILE_NAME} in it or below. A run writes them "
            "with FP8Config(monitor=100), or TORCH_FP8_CONFIG='{\"monitor\": 100}'"
        )
    if len(paths) > 1:
        names = ", ".join(str(path.parent) for path in paths[:5])
        raise ValueError(f"{run} holds the statistics of {len(paths)} runs; choose one: {names}")
    return paths[0]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
