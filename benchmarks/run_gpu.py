"""Everything that awaits a GPU, in one command: the GPU tests, then every benchmark.

    python -m benchmarks.run_gpu                          # all parts, within the budget
    python -m benchmarks.run_gpu --parts linear block     # some; several calls cover everything
    python -m benchmarks.run_gpu --toy                    # the same at toy size, also on a CPU

Parts, the most telling first: tests, timing, linear, block, step, memory, gemm, optimizer. Each is
a process of its own that gets its share of the time that is left, by the weights in `PARTS`, and
writes its CSV, a row at a time, and its picture under benchmarks/results; gpu_run.csv says how each
went. Rows stay until they are measured again. What follows ``--`` goes to every part that is named:

    python -m benchmarks.run_gpu --parts step -- --models Llama-3.1-8B --modes compiled

``tests`` are the GPU tests, in several processes where pytest-xdist is there, for most of their
time goes into compiling kernels; ``timing`` those that compare times, which need the card to
themselves. The exit status is 0 if that of every part is.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.measurement import (
    RESULTS,
    ROOT,
    TOY_RESULTS,
    Table,
    default_device,
    environment,
    note_of,
)
from benchmarks.plot import draw

BUDGET = 540.0
"""The seconds of the whole, so that ten minutes also hold the start of Python and the results."""
PARTS = {
    "tests": 2.5,
    "timing": 0.5,
    "linear": 2.5,
    "block": 1.5,
    "step": 4.0,
    "memory": 1.5,
    "gemm": 1.0,
    "optimizer": 1.0,
}
"""The weight of each part's share in the time that is left to it and those after it."""
TESTS = {"tests": "gpu and not alone", "timing": "gpu and alone"}
"""The tests that each part of tests runs."""
GRACE = 20.0
"""The seconds before the end of its share in which a part begins nothing new."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="toy sizes, also on a CPU")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--results", type=Path, help="directory of the CSV files")
    parser.add_argument("options", nargs="*", help="for the parts, after --")
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error("there is no GPU here; --toy runs everything at toy size on the CPU")
    results = arguments.results or (TOY_RESULTS if arguments.toy else RESULTS)
    deadline = time.monotonic() + arguments.budget
    columns = ("part", "seconds", "result")
    table = Table(results / "gpu_run.csv", columns, ("part",), environment(default_device()))
    names = [name for name in PARTS if name in arguments.parts]
    statuses = []
    for i, name in enumerate(names):
        share = PARTS[name] / sum(PARTS[later] for later in names[i:])
        seconds = share * (deadline - time.monotonic())
        toy = ["--toy"] if arguments.toy else []
        command = [*command_of(name, results), *(toy if name not in TESTS else [])]
        began = time.monotonic()
        status, result = run_part(name, [*command, *arguments.options], seconds)
        statuses.append(status)
        spent = round(time.monotonic() - began, 1)
        table.add([{"part": name, "seconds": spent, "result": result}])
        print(f"== {name}: {result} in {spent} s", flush=True)
        if status and name not in TESTS:
            draw_what_there_is(results / f"{name}.csv")
    sys.exit(any(statuses))  # of a process that a signal has ended it is negative


def command_of(name: str, results: Path) -> list[str]:
    """Return the command of a part; without a card the GPU tests are only collected."""
    if name not in TESTS:
        csv = str(results / f"{name}.csv")
        return [sys.executable, "-m", f"benchmarks.bench_{name}", "--csv", csv]
    command = [sys.executable, "-m", "pytest", "-q", "-m", TESTS[name], *gpu_tests()]
    if not torch.cuda.is_available():
        return [*command, "--collect-only"]
    parallel = name == "tests" and importlib.util.find_spec("xdist") is not None
    return [*command, "-n", str(num_processes())] if parallel else command


def gpu_tests() -> list[str]:
    """Return the files with GPU tests: others may need packages that a machine with a card
    lacks.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


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
    """Run one part -> (exit status, one line on how it went)."""
    print(f"== {name}: up to {seconds:.0f} s", flush=True)
    environment = dict(os.environ)
    if name in TESTS:
        environment["OMP_NUM_THREADS"] = "1"  # beside other processes
    else:
        command = [*command, "--budget", f"{max(seconds - GRACE, 0.5 * seconds):.0f}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=os.setpgrp,  # a group of its own: what it starts may hold the pipe as it does
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        # As from the keyboard: pytest then reports what it has run so far.
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=GRACE / 2)
        except subprocess.TimeoutExpired:
            end_all(process)
            output, _ = process.communicate()
        print(output, flush=True)
        return 1, f"ended after {seconds:.0f} s{_counted(name, output)}"
    finally:
        end_all(process)  # and what it may have left running, beside which nothing is to be timed
    print(output, flush=True)
    if name in TESTS and _counted(name, output):
        return process.returncode, _counted(name, output).removeprefix(", ")
    status = process.returncode
    return status, "done" if status == 0 else f"exit status {status}"


def end_all(process: subprocess.Popen) -> None:
    """End a part and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _counted(name: str, output: str) -> str:
    """Return what pytest says that it has run."""
    last = (output.strip().splitlines() or [""])[-1]
    found = re.search(r"\d+ (passed|failed|error|tests? collected|deselected).*", last)
    return f", {found.group(0).strip('= ')}" if name in TESTS and found else ""


if __name__ == "__main__":
    main()
