"""``torch-fp8 report``: a run's figures as PNGs, and its events and worst tensors as tables."""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch_fp8.monitor.alarm import DEFAULT_BOUNDS, Bound
from torch_fp8.monitor.run_log import FILE_NAME
from torch_fp8.monitor.series import PREFIX
from torch_fp8.quantization.formats import E4M3
from torch_fp8.quantization.wording import aligned, counted
from torch_fp8_tools.report.figures import TOPICS, draw_map, heat_map
from torch_fp8_tools.report.run_record import RunRecord, read_run

_WORST, _MOST_EVENTS = 12, 200
EVENTS = {
    "alarm": "alarm",
    "left_out": "amax left out",
    "loss_spike": "loss spike",
    "fallback": "fallback",
    "return": "back to FP8",
}
"""The label of each kind of event."""
_BAD = ("alarm", "loss_spike", "fallback")
"""The events that the verdict counts."""


def write_figures(record: RunRecord, folder: Path) -> list[Path]:
    """Write a map of layers and steps for each statistic, as PNGs.

    A statistic that is ideal in every measured layer and step has no map.

    Args:
        record: the record of the run.
        folder: the folder for the files; it is created for the first one.
    Returns:
        The files.
    Raises:
        ImportError: matplotlib is missing.
    """
    written = []
    for topic in TOPICS:
        heat = heat_map(record, topic)
        if heat is not None and not heat.is_blank:
            picture = draw_map(heat)
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"{topic.statistic}.png")
            written[-1].write_bytes(picture)
    return written


def tables(record: RunRecord) -> str:
    """Return the verdict on a run, its events, and the tensors closest to a bound."""
    counts = Counter(str(event["event"]) for event in record.events)
    bad = ", ".join(counted(counts[kind], EVENTS[kind]) for kind in _BAD if counts[kind])
    last = [record.losses[step] for step in sorted(record.losses)[-50:]]
    worst = [row for _, row in sorted(_nearest(record), key=lambda pair: -pair[0])[:_WORST]]
    sections = [
        f"{bad}." if bad else "No bound was crossed and the loss did not jump.",
        f"mean loss of the last {len(last)} steps: {sum(last) / len(last):.4g}" if last else "",
        _table(("step", "event", "what and why"), _events(record), left=3),
        _table(("tensor", "worst", "at step", "last", "bound", "state"), worst, left=1),
    ]
    out = [layer for layer, _, end in record.absences() if end == math.inf]
    if out:
        sections.insert(1, f"Out of FP8 at the end: {', '.join(out)}.")
    return "\n\n".join(filter(None, sections))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], left: int) -> str:
    return aligned([head, *rows], left) if rows else ""


def _events(record: RunRecord) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for event in record.events[:_MOST_EVENTS]:
        kind = str(event["event"])
        label = EVENTS.get(kind, kind)
        rows.append(
            (f"{int(event['step']):,}", label, " ".join(str(event.get("what", "")).split()))
        )
    more = len(record.events) - _MOST_EVENTS
    return [*rows, ("", "", f"and {more} more, in {record.path.name}")] if more > 0 else rows


def _nearest(record: RunRecord) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Yield each bounded tensor's nearness to its bound, and its row of the table."""
    bounds = {(bound.kind, bound.statistic): bound for bound in DEFAULT_BOUNDS}
    for name, values in record.values.items():
        place, _, statistic = name.rpartition("/")
        bound = bounds.get((place.rpartition("/")[2], statistic))
        if bound is None or not values:
            continue
        nearness, step = max((_nearness(value, bound), -step) for step, value in values.items())
        worst = values[-step]
        is_least = worst < bound.least or math.isinf(bound.most)
        limit = f">= {bound.least:g}" if is_least else f"<= {bound.most:g}"
        state = "over" if nearness > 1 else "near" if nearness > 0.5 else "fine"
        last = values[max(values)]
        numbers = (_number(worst), f"{-step:,}", _number(last), limit, state)
        yield nearness, (name.removeprefix(PREFIX), *numbers)


def _nearness(value: float, bound: Bound) -> float:
    """Return 1 at the bound, above 1 beyond it, and less the farther a value is from it."""
    if math.isnan(value):
        return 0.0
    if value < bound.least:
        return 1.0 + (bound.least - value) / max(abs(bound.least), 1e-30)
    if math.isinf(bound.most):  # dB above the bound, relative to a good cast's
        return max(0.0, 1.0 - (value - bound.least) / (E4M3.cast_sqnr_db - bound.least))
    if bound.most > 1e30 or not bound.most:  # only crossed or not
        return 2.0 if value > bound.most else 0.0
    return value / bound.most


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3g}"


def report(options: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit status."""
    record = read_run(options.path)
    model = record.path.stem.removeprefix(Path(FILE_NAME).stem)
    written = write_figures(record, options.output or record.path.parent / f"fp8_report{model}")
    for note in record.notes:
        print(f"note: {note}", file=sys.stderr)
    name = record.path.resolve().parent.name
    print(f"{name}: {len(record.steps)} measured steps, {len(record.events)} events")
    print(f"{tables(record)}\n")
    for path in written:
        print(path)
    return 0
