"""`TrialRecord`: what the ranks of a trial have measured, read from their files.

`difference` and `steps_to_equal_loss` compare the losses of two variants step by step.
"""

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_fp8.monitor.run_log import FILE_NAME
from torch_fp8_tools.compare.trial import WARM_UP, Trial, rank_of


class TrialRecord:
    """The measurements of a trial.

    Args:
        trial: the trial.
        result: the result of `run_trial`; a trial that was cut off has an error.
    Attributes:
        losses: loss by optimizer step, averaged over the ranks.
        rows: the lines of rank 0's steps.
        facts: rank 0's facts of the start: weights, optimizer, device, layers.
        count: number of ranks that measured on this machine.
        evaluations: (step, losses by name).
        peaks: peak bytes of each rank that measured them.
        profile: shares of the time, averaged over the ranks.
        notes: lines on what was overridden, redirected or not.
        fingerprints: checksums of the first batches of rank 0.
    """

    def __init__(self, trial: Trial, result: Mapping[str, Any]) -> None:
        self.trial, self.result = trial, result
        self.losses: dict[int, float] = {}
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.peaks: list[int] = []
        self.notes: list[str] = []
        self.fingerprints: list[int] = []
        self.end: str | None = None
        self.tokens_of_ranks = 0.0
        ranks = [_lines(p) for p in sorted(Path(trial.folder).glob("rank*.jsonl"), key=rank_of)]
        self.count = len(ranks)
        for index, lines in enumerate(ranks):
            self._take(lines, index == 0)
        by_step: dict[int, list[float]] = {}
        for lines in ranks:
            for line in lines:
                if line.get("loss") is not None:
                    by_step.setdefault(line["step"], []).append(line["loss"])
        self.losses = {step: statistics.fmean(by_step[step]) for step in sorted(by_step)}
        shares = [
            line["profile"]["shares"] for lines in ranks for line in lines if "profile" in line
        ]
        parts = dict.fromkeys(part for share in shares for part in share)
        self.profile = {
            part: statistics.fmean(share.get(part, 0.0) for share in shares) for part in parts
        }

    def _take(self, lines: list[dict[str, Any]], is_first: bool) -> None:
        peak = max((line["peak"] for line in lines if "peak" in line), default=0)
        profiled = [line["profile"].get("peak", 0) for line in lines if "profile" in line]
        peak = max([peak, *profiled])
        if peak:
            self.peaks.append(peak)
        rows = [line for line in lines if "loss" in line]
        timed = [row for row in rows if row["tokens"] and row["step"] > WARM_UP]
        if timed:
            self.tokens_of_ranks += statistics.median(row["tokens"] for row in timed)
        if not is_first:
            return
        self.rows = rows
        for line in lines:
            if "weights" in line:
                self.facts = line
            elif "note" in line:
                self.notes.append(line["note"])
            elif "evaluation" in line:
                self.evaluations.append((line["step"], line["evaluation"]))
            elif "end" in line:
                self.end, self.fingerprints = line["end"], line["fingerprints"]

    @property
    def alarms(self) -> list[str]:
        """The monitor's warnings, if the variant has a monitor (``monitor=10``)."""
        paths = Path(self.trial.folder).rglob(f"{Path(FILE_NAME).stem}*.jsonl")
        lines = [line for path in sorted(paths) for line in _lines(path)]
        return [str(line.get("what", "")) for line in lines if line.get("event") == "alarm"]

    @property
    def error(self) -> str | None:
        return self.result.get("error")

    @property
    def steady_rows(self) -> list[dict[str, Any]]:
        """The steps after the warm-up, in which nothing was compiled or profiled."""
        steady, graphs = [], 0
        for row in self.rows:
            if row["step"] > WARM_UP and not row["profiled"] and row["graphs"] == graphs:
                steady.append(row)
            graphs = row["graphs"]
        return steady or self.rows[1:] or self.rows

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step."""
        rows = self.steady_rows
        return statistics.median(row["seconds"] for row in rows) if rows else None

    @property
    def warm_up_seconds(self) -> float:
        """Seconds of the first steps, and of later ones in which something was compiled."""
        steady = {row["step"] for row in self.steady_rows}
        return sum(r["seconds"] for r in self.rows if r["step"] not in steady and not r["profiled"])

    @property
    def recompilations(self) -> int:
        """Number of graphs that were compiled after the first steps."""
        first = [row["graphs"] for row in self.rows if row["step"] <= WARM_UP]
        return self.rows[-1]["graphs"] - first[-1] if first else 0

    @property
    def loading_share(self) -> float:
        """Share of the steady steps' time that DataLoaders took."""
        rows = self.steady_rows
        total = sum(row["seconds"] for row in rows)
        return min(1.0, sum(row["data"] for row in rows) / total) if total else 0.0


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the last one may be cut off
            lines.append(json.loads(line))
    return lines


_BLOCKS = 6


class Difference(NamedTuple):
    """The relative difference of losses: mean, standard error (or None), number of steps."""

    mean: float
    error: float | None
    steps: int

    @property
    def is_certain(self) -> bool:
        """Whether it exceeds twice its standard error."""
        return self.error is not None and abs(self.mean) > 2 * self.error

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {100 * self.error:.2f}"
        return f"{100 * self.mean:+.2f}{error} %"


def difference(
    reference: Sequence[Mapping[int, float]], losses: Sequence[Mapping[int, float]]
) -> Difference | None:
    """Compare two variants, paired by seed and step, over the last half of their common steps.

    The difference of a step is divided by the mean of the reference, and the standard error is that
    of the means of blocks of steps, because neighbouring steps are correlated.

    Args:
        reference: losses by step, one mapping for each seed.
        losses: losses of the other variant, in the same order of seeds.
    Returns:
        The difference, or None if no step is common to both.
    """
    blocks: list[float] = []
    values: list[float] = []
    for base, other in zip(reference, losses, strict=False):
        steps = last_half(base, other)
        scale = statistics.fmean(abs(base[s]) for s in steps) if steps else 0.0
        if not scale:
            continue
        apart = [(other[s] - base[s]) / scale for s in steps]
        values += apart
        count = min(_BLOCKS, len(apart))
        edges = [round(i * len(apart) / count) for i in range(count + 1)]
        pairs = itertools.pairwise(edges)
        blocks += [statistics.fmean(apart[low:high]) for low, high in pairs]
    if not values:
        return None
    error = statistics.stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else None
    return Difference(statistics.fmean(values), error, len(values))


def last_half(*losses: Mapping[int, float]) -> list[int]:
    """Return the last half of the steps in which all of these losses are finite."""
    common = set.intersection(*(set(values) for values in losses)) if losses else set()
    steps = sorted(s for s in common if all(math.isfinite(values[s]) for values in losses))
    return steps[len(steps) // 2 :]


def is_diverged(losses: Mapping[int, float]) -> bool:
    """Return whether a loss is not finite."""
    return not all(map(math.isfinite, losses.values()))


def steps_to_equal_loss(
    reference: Sequence[Mapping[int, float]], losses: Sequence[Mapping[int, float]]
) -> float | None:
    """Return the number of steps in which a variant reaches the reference's last loss.

    The difference of the losses is divided by the slope of the reference's loss over its last half,
    a straight line fitted to all seeds.

    Returns:
        The steps, or None if the reference's loss does not fall there, or nothing is common.
    """
    gaps, slopes, last = [], [], 0
    for base, other in zip(reference, losses, strict=False):
        steps = last_half(base, other)
        if len(steps) < 3:
            continue
        gaps.append(statistics.fmean(other[s] - base[s] for s in steps))
        slopes.append(statistics.linear_regression(steps, [base[s] for s in steps]).slope)
        last = max(last, steps[-1])
    if not slopes:
        return None
    slope = statistics.fmean(slopes)
    if slope >= 0:
        return None
    return max(1.0, last + statistics.fmean(gaps) / -slope)
