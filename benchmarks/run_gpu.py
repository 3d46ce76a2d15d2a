"""Everything that needs a GPU, in one command: the self-test, the GPU tests, every benchmark.

    python -m benchmarks.run_gpu                          # what fits into nine minutes
    python -m benchmarks.run_gpu --seconds 1500           # or into the time that you have
    python -m benchmarks.run_gpu --parts linear block     # some; several calls cover everything
    python -m benchmarks.run_gpu --toy                    # the same at toy size, also on a CPU

The parts and their order are those of `PARTS`. The command first prints a plan with the estimated
seconds of each. A part gets its estimate and, if all parts fit, its share of the remaining time. At
the end the command prints the parts that did not run, with their commands. If a check of the
self-test fails, it runs nothing else.

Each part is a process that writes a CSV row by row: tests.csv has a row for each test
from the beginning, and the benchmarks draw pictures, too. gpu_run.csv has the result of each part.
The files are in ``$OUT`` if it is set, otherwise in runs/benchmarks. Arguments after ``--`` go to
every part in ``--parts``:

    python -m benchmarks.run_gpu --parts step -- --models Llama-3.1-8B --modes compiled

``tests`` run in several processes if pytest-xdist is installed, because compiling kernels takes
most of their time; see `benchmarks.gpu_tests` for their order. ``timing`` are the tests that
compare times and need the card for themselves. The exit status is 0 if that of every part is 0.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu_tests import NOT_RUN, counted
from benchmarks.measurement import (
    NOT_REACHED,
    ROOT,
    TOY_RESULTS,
    Table,
    default_device,
    environment,
    note_of,
)
from benchmarks.plot import draw
from benchmarks.rows import OUTPUT
from torch_fp8_tools.env.result import SUBJECTS

SECONDS = 540.0
"""The seconds of the whole, so that ten minutes also hold the start of Python and the results."""
PARTS = {
    "self-test": 40.0,
    "step": 300.0,
    "block": 60.0,
    "head": 45.0,
    "moe": 45.0,
    "tests": 120.0,
    "timing": 30.0,
    "optimizer": 45.0,
    "loss": 340.0,
    "linear": 120.0,
    "gemm": 60.0,
    "memory": 60.0,
}
"""The estimated seconds of each part on an H200 with 16 cores, the most telling first."""
TESTS = {"tests": "gpu and not alone", "timing": "gpu and alone"}
"""The tests that each part of tests runs."""
GRACE = 20.0
"""The seconds before the end of its time in which a part begins nothing new."""
LEAST = 0.5
"""The share of its estimate without which a part does not begin."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="toy sizes, also on a CPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--results", type=Path, help="directory of the CSV files")
    parser.add_argument("options", nargs="*", help="for the parts, after --")
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error("there is no GPU here; --toy runs everything at toy size on the CPU")
    results = arguments.results or default_results(arguments.toy)
    results.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.seconds
    columns = ("part", "seconds", "result")
    table = Table(results / "gpu_run.csv", columns, ("part",), environment(default_device()))
    names = [name for name in PARTS if name in arguments.parts]
    print(plan(names, arguments.seconds), flush=True)
    statuses, left_out = [], []
    for i, name in enumerate(names):
        seconds = time_of(names[i:], deadline - time.monotonic())
        if not seconds:
            left_out.append(name)
            table.add([{"part": name, "result": NOT_RUN, "note": NOT_REACHED}])
            continue
        toy = ["--toy"] if arguments.toy and name not in (*TESTS, "self-test") else []
        began = time.monotonic()
        command = [*command_of(name, results), *toy, *arguments.options]
        status, result = run_part(name, command, seconds)
        if name in TESTS:
            result += tests_told(results / f"{name}.csv")
        statuses.append(status)
        spent = round(time.monotonic() - began, 1)
        table.add([{"part": name, "seconds": spent, "result": result}])
        print(f"== {name}: {result} in {spent} s", flush=True)
        if name == "self-test" and status and result != cut_off(seconds):
            left_out = names[i + 1 :]
            print("== the self-test fails: fix that first; it names the check", flush=True)
            break
        if status and name not in (*TESTS, "self-test"):
            draw_what_there_is(results / f"{name}.csv")
    if left_out:
        again = f"python -m benchmarks.run_gpu --parts {' '.join(left_out)}"
        print(f"== not run: {', '.join(left_out)}; {again}", flush=True)
    sys.exit(any(statuses))  # of a process that a signal has ended it is negative


def default_results(toy: bool) -> Path:
    """Return the directory of the CSV files: ``$OUT``, or the one of full or of toy size."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"])
    return TOY_RESULTS if toy else OUTPUT


def time_of(names: list[str], left: float) -> float:
    """Return the seconds of the first of the remaining parts, or 0 if it does not begin.

    Args:
        names: the parts that remain.
        left: the seconds that remain.
    """
    estimate, all_ = PARTS[names[0]], sum(PARTS[name] for name in names)
    if left < LEAST * estimate:
        return 0.0
    return min(left, estimate * max(1.0, left / all_))


def plan(names: list[str], seconds: float) -> str:
    """Return the lines of the plan, if every part takes its time."""
    lines, left = [f"== plan for {seconds:.0f} s; estimated seconds, and those it gets"], seconds
    for i, name in enumerate(names):
        given = time_of(names[i:], left)
        left -= given
        lines.append(f"   {name:<10}{PARTS[name]:>6.0f}{f'{given:.0f}' if given else NOT_RUN:>9}")
    return "\n".join(lines)


def tests_told(path: Path) -> str:
    """Return the number of tests with each result in a CSV, for the line of their part."""
    counts = counted(path)
    return "".join(f", {count} {result}" for result, count in counts.items())


def command_of(name: str, results: Path) -> list[str]:
    """Return the command of a part; without a card the GPU tests are only collected."""
    if name == "self-test":
        report = str((results / "self_test.txt").resolve())
        only = SUBJECTS if torch.cuda.is_available() else SUBJECTS[:1]  # hosts train in `step`
        command = [sys.executable, "-m", "torch_fp8", "env", "--self-test", "--only", *only]
        return ["bash", "-c", 'set -o pipefail; "$@" | tee "$0"', report, *command]
    csv = str((results / f"{name}.csv").resolve())
    if name not in TESTS:
        return [sys.executable, "-m", f"benchmarks.bench_{name}", "--csv", csv]
    plugin = ["-p", "benchmarks.gpu_tests", "--results", csv]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-m", TESTS[name], *gpu_tests(name)]
    if not torch.cuda.is_available():
        return [*command, "--collect-only"]
    parallel = name == "tests" and importlib.util.find_spec("xdist") is not None
    # One at a time: workers that get long lists would not keep the order.
    return [*command, "--maxschedchunk", "1", "-n", str(num_processes())] if parallel else command


def gpu_tests(name: str) -> list[str]:
    """Return the files with a part's GPU tests; others may need packages that a machine with a
    card lacks.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    mark = "mark.alone" if name == "timing" else "mark.gpu"
    return [str(path) for path in files if mark in path.read_text(encoding="utf-8")]


def num_processes() -> int:
    """Return the number of test processes; each compiles on one core and seldom holds up to 24
    GiB.
    """
    return max(1, min(12, (os.cpu_count() or 1) * 3 // 4))


def draw_what_there_is(csv: Path) -> None:
    """Draw the picture of a part that was ended before it drew its own."""
    try:
        if csv.exists():
            draw(csv)
    except Exception as error:  # the rows are what counts
        print(f"no picture of {csv.name}: {note_of(error)}", flush=True)


def run_part(name: str, command: list[str], seconds: float) -> tuple[int, str]:
    """Run one part -> (exit status, one line on how it went); its output is shown as it comes."""
    print(f"== {name}: up to {seconds:.0f} s", flush=True)
    environment = dict(os.environ)
    if name in TESTS:
        environment["OMP_NUM_THREADS"] = "1"  # several processes share the cores
    elif name != "self-test":
        command = [*command, "--budget", f"{max(seconds - GRACE, 0.5 * seconds):.0f}"]
    # A group of its own, which is ended with it.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=os.setpgrp)
    try:
        status = process.wait(max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        # As from the keyboard: pytest then reports what it has run so far.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE / 2)
        return 1, cut_off(seconds)
    finally:
        end_all(process)  # and what it may have left running: that would disturb the next timing
    return status, "done" if status == 0 else f"exit status {status}"


def cut_off(seconds: float) -> str:
    """Return the line on a part whose time was over."""
    return f"ended after {seconds:.0f} s"


def end_all(process: subprocess.Popen) -> None:
    """End a part and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
