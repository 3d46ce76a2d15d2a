"""What healthy runs and planted faults look like to the monitor, and when it warns.

    nice -n 19 python -m benchmarks.monitor_bounds --only faults
    nice -n 19 python -m benchmarks.monitor_bounds --only healthy

Each run goes on with the small Llama of `benchmarks.aligned_channels`. Without faults it shows how
near healthy numbers come to each default bound; with them, how many steps before the smoothed loss
is 5 % off BF16's the first warning comes, and whether a fall-back to BF16 saves the run. Writes
``monitor_faults.csv``, ``monitor_healthy.csv`` and ``monitor_bounds.csv``.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.aligned_channels import NO_FAULTS, Faults, pretrained, train
from benchmarks.rows import OUTPUT, write_rows
from torch_fp8 import FP8Config
from torch_fp8.monitor.alarm import DEFAULT_BOUNDS
from torch_fp8.monitor.monitor import Monitor

RECIPES = ("delayed", "tensorwise")
PLANTED = {
    "aligned": Faults(magnitude=2000.0, outlier=1.0),
    "outliers": Faults(magnitude=1.0),
}
SMOOTHED = 20
"""Steps that a loss is averaged over."""
OFF = 1.05
"""The smoothed loss is off where it is so many times BF16's."""


class Watched(NamedTuple):
    """A run and what its monitor saw: losses, step to series, events, held-out loss."""

    losses: list[float]
    series: dict[int, dict[str, float]]
    events: list[dict[str, Any]]
    eval_loss: float


def watch(
    config: FP8Config | None,
    seed: int,
    faults: Faults,
    steps: int,
    start: Any,
    folder: Path | None = None,
) -> Watched:
    """Train with a monitor, where the configuration has one."""
    series: dict[int, dict[str, float]] = {}
    monitors: list[Monitor] = []

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if config is None or not config.monitor:
            return
        monitor = Monitor(
            model,
            [optimizer],
            config,
            folder=folder,
            log=lambda values, step: series.update({step: values}),
        )
        monitors.append(monitor)

        def note(module: nn.Module, args: Any, output: Any) -> None:
            if module.training:
                monitor.observe_loss(output.loss)

        model.register_forward_hook(note)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        run = train(config, seed, faults, steps, start=start, prepare=prepare)
    events = monitors[0].events if monitors else []
    for monitor in monitors:
        monitor.close()
    return Watched(run.losses, series, events, run.eval_loss)


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last `SMOOTHED` losses at each step."""
    parts = [losses[max(0, i - SMOOTHED + 1) : i + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def first_off(losses: Sequence[float], reference: Sequence[float]) -> int | None:
    """The first step, from 1, whose smoothed loss is `OFF` times the reference's."""
    pairs = zip(smoothed(losses), smoothed(reference), strict=True)
    return next((i for i, (a, b) in enumerate(pairs, 1) if not a <= OFF * b), None)


def first_warning(watched: Watched) -> int | None:
    """The step of the first warning."""
    kinds = ("alarm", "loss_spike")
    return next((e["step"] for e in watched.events if e["event"] in kinds), None)


def extremes(watched: Sequence[Watched]) -> dict[tuple[str, str], tuple[float, float]]:
    """Kind and statistic to the smallest and largest number that occurred."""
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in watched:
        for values in run.series.values():
            for name, value in values.items():
                place, _, statistic = name.rpartition("/")
                seen[place.rpartition("/")[2], statistic].append(value)
    return {key: (min(values), max(values)) for key, values in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("healthy", "faults"))
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--runs", type=Path, help="a folder to keep the statistics in")
    parser.add_argument("--pretraining", type=int, default=600, help="steps in BF16 before")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="the monitor's interval")
    text = "of the three CSV files; benchmarks/results has those that are committed"
    parser.add_argument("--folder", type=Path, default=OUTPUT, help=text)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only != "healthy":
        _faults(options)
    if options.only != "faults":
        _healthy(options)


def _faults(options: argparse.Namespace) -> None:
    rows: list[list[Any]] = []
    start = pretrained(0, options.pretraining)
    for name, faults in PLANTED.items():
        reference = watch(None, 0, faults, options.steps, start)
        for on_alarm in ("warn", "bf16"):
            config = FP8Config(recipe="delayed", monitor=options.every, on_alarm=on_alarm)
            folder = options.runs and options.runs / f"{name}-{on_alarm}"
            run = watch(config, 0, faults, options.steps, start, folder)
            off = first_off(run.losses, reference.losses)
            rows.append(
                [name, on_alarm, first_warning(run) or "", off or "", *_end(run, reference)]
            )
            print(*rows[-1], sep=", ", flush=True)
    columns = "fault,on_alarm,first_warning,loss_off,held_out_percent,fallbacks"
    _write(options.folder / "monitor_faults.csv", columns, rows)


def _healthy(options: argparse.Namespace) -> None:
    found: dict[str, list[Watched]] = {recipe: [] for recipe in RECIPES}
    rows: list[list[Any]] = []
    for seed in range(options.seeds):
        start = pretrained(seed, options.pretraining)
        reference = watch(None, seed, NO_FAULTS, options.steps, start)
        for recipe in RECIPES:
            config = FP8Config(recipe=recipe, monitor=options.every, on_alarm="bf16")
            folder = options.runs and options.runs / f"healthy-{recipe}-{seed}"
            run = watch(config, seed, NO_FAULTS, options.steps, start, folder)
            found[recipe].append(run)
            rows.append([recipe, seed, first_warning(run) or "", *_end(run, reference)])
            print(*rows[-1], sep=", ", flush=True)
    columns = "recipe,seed,first_warning,held_out_percent,fallbacks"
    _write(options.folder / "monitor_healthy.csv", columns, rows)
    bounds: list[list[Any]] = []
    for recipe, runs in found.items():
        seen = extremes(runs)
        for bound in DEFAULT_BOUNDS:
            low, high = seen.get((bound.kind, bound.statistic), (float("nan"),) * 2)
            row = [recipe, bound.kind, bound.statistic, f"{low:.4g}", f"{high:.4g}"]
            bounds.append([*row, bound.least, bound.most])
    columns = "recipe,kind,statistic,lowest,highest,least,most"
    _write(options.folder / "monitor_bounds.csv", columns, bounds)


def _end(run: Watched, reference: Watched) -> tuple[str, int]:
    """How far the held-out loss is from the reference's, %, and how many layers fell back."""
    apart = 100 * (run.eval_loss / reference.eval_loss - 1)
    return f"{apart:.2f}", sum(event["event"] == "fallback" for event in run.events)


def _write(path: Path, columns: str, rows: list[list[Any]]) -> None:
    names = columns.split(",")
    write_rows(path, names, [dict(zip(names, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
