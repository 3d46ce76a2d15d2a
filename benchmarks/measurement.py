"""Interleaved timing, and CSV rows that say where they come from."""

import csv
import datetime
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ENVIRONMENT = ("gpu", "driver", "torch", "cuda", "triton", "commit", "date", "command")
CYCLES_PER_MS = 2_000_000  # of a GPU's clock, at most
FLUSH_BYTES = 256 * 2**20  # five times the largest L2 (50 MB on H100 and H200)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over the repetitions."""

    median: float
    p20: float
    p80: float


def interleaved(
    variants: dict[str, Callable[[], None]],
    device: torch.device,
    repetitions: int,
    warmup: int = 3,
    wait_ms: float = 0.0,
) -> dict[str, Timing]:
    """Time every variant in turn, so that drift of clocks and temperature hits all alike.

    Args:
        variants: name -> one call of what is measured.
        device: where they run; on a GPU the L2 cache is flushed before each call.
        repetitions: calls of each variant.
        warmup: calls of each variant before.
        wait_ms: how long a GPU waits before each call, about: longer than the host needs to launch
            it, where that is not to be measured.
    """
    for _ in range(warmup):
        for run in variants.values():
            run()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    clock = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    flush = torch.empty(
        FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.int8, device=device
    )
    names = list(variants)
    for repetition in range(repetitions):
        for i in range(len(names)):  # another one goes first each time
            name = names[(repetition + i) % len(names)]
            flush.zero_()
            if wait_ms and device.type == "cuda":
                torch.cuda._sleep(int(wait_ms * CYCLES_PER_MS))
            samples[name].append(clock(variants[name]))
    return {name: _timing(values) for name, values in samples.items()}


def _time_on_gpu(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _time_on_cpu(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _timing(values: list[float]) -> Timing:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]
    )


def timing_of(values: list[float]) -> Timing:
    """Median and percentiles of samples in milliseconds that were taken elsewhere."""
    return _timing(values)


def environment(device: torch.device) -> dict[str, str]:
    """The columns of ENVIRONMENT."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": _triton_version(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
    }


def write_rows(path: Path, columns: tuple[str, ...], rows: list[dict[str, object]]) -> None:
    """Replace `path` by these rows; written whole each time: a cut-off run keeps its rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def print_table(columns: tuple[str, ...], rows: list[dict[str, object]]) -> None:
    """Aligned columns on standard output."""
    cells = [columns, *([str(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _processor() -> str:
    return f"none ({platform.machine()} CPU)"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


def _output(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip().splitlines()[0] if run.stdout.strip() else "unknown"
