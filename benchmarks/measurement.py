"""Interleaved timing, and CSV rows with their origin."""

import argparse
import datetime
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from benchmarks.rows import OUTPUT, RESULTS, ROOT, read_rows, write_rows
from torch_fp8.conversion import fused_layers

TOY_RESULTS = ROOT / "runs" / "toy"
ENVIRONMENT = ("gpu", "driver", "torch", "cuda", "triton", "commit", "date", "command")
CYCLES_PER_MS = 2_000_000  # of a GPU's clock, at most
FLUSH_BYTES = 256 * 2**20  # five times the largest L2 (50 MB on H100 and H200)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over the repetitions; `host`: until all is launched, median."""

    median: float
    p20: float
    p80: float
    host: float = 0.0

    def columns(self) -> dict[str, object]:
        """Return the timing as columns of a row."""
        names = {"median_ms": self.median, "p20_ms": self.p20, "p80_ms": self.p80}
        return {name: round(value, 4) for name, value in names.items()}


def interleaved(
    variants: dict[str, Callable[[], None]],
    device: torch.device,
    repetitions: int,
    warmup: int | None = None,
    wait_ms: float = 0.0,
    failures: dict[str, str] | None = None,
) -> dict[str, Timing]:
    """Time the variants in turn, so that drift of clocks and temperature affects all of them.

    Args:
        variants: name -> one call of the measured function.
        device: where they run; on a GPU the L2 cache is flushed before each call.
        repetitions: calls of each variant.
        warmup: calls of each variant before, or None for 3 on a GPU and 1 on a CPU, whose times
            do not count.
        wait_ms: about how long a GPU waits before each call: longer than the host needs to launch
            it, if the host's time is not to be measured.
        failures: gets a note for each variant that raises, while the others go on; or None to
            raise here.
    """
    runs = dict(variants)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    clock = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    warmup = (3 if device.type == "cuda" else 1) if warmup is None else warmup
    flush = torch.empty(
        FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.int8, device=device
    )
    for repetition in range(-warmup, repetitions):
        names = list(runs)
        for i in range(len(names)):  # another one goes first each time
            name = names[(repetition + i) % len(names)]
            flush.zero_()
            if wait_ms and repetition >= 0 and device.type == "cuda":
                torch.cuda._sleep(int(wait_ms * CYCLES_PER_MS))
            try:
                sample = clock(runs[name])
            except Exception as error:
                if failures is None:
                    raise
                failures[name] = note_of(error)
                del runs[name]
                continue
            if repetition >= 0:
                samples[name].append(sample)
    return {name: _timing(samples[name]) for name in runs if samples[name]}


def _time_on_gpu(run: Callable[[], None]) -> tuple[float, float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    began = time.perf_counter()
    run()
    host = (time.perf_counter() - began) * 1e3
    end.record()
    end.synchronize()
    return start.elapsed_time(end), host


def _time_on_cpu(run: Callable[[], None]) -> tuple[float, float]:
    start = time.perf_counter()
    run()
    milliseconds = (time.perf_counter() - start) * 1e3
    return milliseconds, milliseconds


def _timing(samples: list[tuple[float, float]]) -> Timing:
    ordered = sorted(milliseconds for milliseconds, _ in samples)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered),
        ordered[round(0.2 * last)],
        ordered[round(0.8 * last)],
        statistics.median(host for _, host in samples),
    )


def timing_of(values: list[float]) -> Timing:
    """Return median and percentiles of samples in milliseconds that were taken elsewhere."""
    return _timing([(value, 0.0) for value in values])


def environment(device: torch.device) -> dict[str, str]:
    """Return the columns of ENVIRONMENT."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": _triton_version(),
        # In a copy without history, the variable has the commit.
        "commit": os.environ.get("COMMIT")
        or _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": command_line(),
    }


def command_line() -> str:
    """Return the command of this process, as you would type it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return shlex.join(["python", *sys.argv])
    return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])


def parser(
    name: str, description: str, *, without_gpu: tuple[str, ...] = ()
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every benchmark has: ``--toy``, ``--budget`` and
    ``--csv``.

    Args:
        name: the CSV's name without its ending.
        without_gpu: flags with which it runs at full size without a card, too.
    """

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *given, **options):  # type: ignore[override]
            arguments = super().parse_args(*given, **options)
            if arguments.csv is None:
                arguments.csv = (TOY_RESULTS if arguments.toy else OUTPUT) / f"{name}.csv"
            if arguments.toy and arguments.csv.resolve().is_relative_to(RESULTS):
                self.error("toy figures do not belong in benchmarks/results")
            flags = ("toy", *(flag.lstrip("-") for flag in without_gpu))
            runs = torch.cuda.is_available() or any(getattr(arguments, f) for f in flags)
            if not runs:
                self.error("there is no GPU here; --toy runs it at toy size on the CPU")
            return arguments

    arguments = Parser(description=description.splitlines()[0])
    arguments.add_argument("--toy", action="store_true", help="toy sizes, also on a CPU")
    arguments.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    arguments.add_argument("--csv", type=Path, help=f"default: runs/benchmarks/{name}.csv")
    return arguments


class Budget:
    """The seconds that a benchmark may take; a piece begins if the longest so far would still fit.

    The first piece always begins, because a benchmark without a row is worth nothing.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._longest = 0.0
        self._any = False

    def fits(self) -> bool:
        """Return whether another piece may begin."""
        return not self._any or time.monotonic() + self._longest <= self._deadline

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Time a piece; enter it around each one."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._any = True
            self._longest = max(self._longest, time.monotonic() - began)


NOT_REACHED = "not reached within the budget"


@contextmanager
def layers_apart() -> Iterator[None]:
    """Let layers that read one input multiply apart in models that are converted here."""
    with mock.patch.object(fused_layers, "can_group", return_value=False):
        yield


def note_of(error: BaseException) -> str:
    """Return a failure as one line of a row."""
    longest = 600 if isinstance(error, GraphBreaksError) else 160
    message = (str(error).strip().splitlines() or [""])[0][:longest]
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return f"out of memory: {message}"
    return f"{type(error).__name__}: {message}"


COMPILER = "inductor" if torch.cuda.is_available() else "aot_eager"
"""The backend of torch.compile. Without a card no time counts, and Inductor's C++ takes minutes."""
GRAPHS = ("graphs", "breaks")
"""The columns of a compiled row that say what torch.compile made of it."""


class GraphBreaksError(Exception):
    """Code that should run as one graph has graph breaks."""


@contextmanager
def graphs_counted(figures: dict[str, object], mode: str) -> Iterator[None]:
    """Count the graphs that torch.compile makes inside, and the breaks.

    Args:
        figures: gets the columns of GRAPHS.
        mode: ``compiled``; in any other nothing is counted.
    Raises:
        GraphBreaksError: at the end, if there was a break; `figures` has its columns then, too.
    """
    if mode != "compiled":
        yield
        return
    stats, reasons = (torch._dynamo.utils.counters[name] for name in ("stats", "graph_break"))
    graphs, before = stats["unique_graphs"], dict(reasons)
    yield
    new = {r: n - before.get(r, 0) for r, n in reasons.items() if n > before.get(r, 0)}
    figures |= {"graphs": stats["unique_graphs"] - graphs, "breaks": sum(new.values())}
    if new:
        texts = "; ".join(" ".join(reason.split())[:200] for reason in new)
        raise GraphBreaksError(f"not valid as compiled, {sum(new.values())} breaks: {texts}")


class Table:
    """The rows of a CSV, which is rewritten whenever rows are added: a cut-off run keeps its rows.

    Rows stay until their group is added again, those of an earlier run, too: several runs fill one
    file, and each row has its own commit and date.

    Args:
        path: the CSV's path.
        columns: in order, without the environment's.
        group: the columns of a group, whose rows are measured and replaced together.
        about: the environment, see `environment`.
    """

    def __init__(
        self, path: Path, columns: tuple[str, ...], group: tuple[str, ...], about: dict[str, str]
    ) -> None:
        self.path, self.columns, self.group = path, (*columns, *ENVIRONMENT), group
        self.about = about
        self.rows: list[dict[str, object]] = []
        self._earlier = read_rows(path)

    def add(self, rows: list[dict[str, object]]) -> None:
        """Replace the rows of these groups, and write the file.

        Rows of other groups stay. A row that was not reached replaces none.
        """
        have = {self._group_of(row) for row in (*self._earlier, *self.rows)}
        rows = [
            row | self.about
            for row in rows
            if row.get("note") != NOT_REACHED or self._group_of(row) not in have
        ]
        new = {self._group_of(row) for row in rows}
        self._earlier = [row for row in self._earlier if self._group_of(row) not in new]
        self.rows = [row for row in self.rows if self._group_of(row) not in new] + rows
        write_rows(self.path, self.columns, [*self._earlier, *self.rows])

    def _group_of(self, row: dict[str, object]) -> tuple[str, ...]:
        return tuple(str(row.get(column, "")) for column in self.group)


def print_table(columns: tuple[str, ...], rows: list[dict[str, object]]) -> None:
    """Print aligned columns on standard output."""
    cells = [columns, *([str(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def default_device() -> torch.device:
    """Return the GPU where there is one."""
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
