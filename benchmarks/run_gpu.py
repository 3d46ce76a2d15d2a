"""Everything that awaits a GPU, in one command: the GPU tests, then every benchmark.

    python -m benchmarks.run_gpu                          # all parts, within the budget
    python -m benchmarks.run_gpu --parts linear block     # some; several calls cover everything
    python -m benchmarks.run_gpu --toy                    # the same at toy size, also on a CPU

Parts, the most telling first: tests, linear, block, step, memory, gemm, optimizer. Each is a
process of its own that gets its share of the time that is left, by the weights in `PARTS`, and
writes its CSV, a row at a time, and its picture under benchmarks/results; gpu_run.csv says how each
went. Rows stay until they are measured again. What follows ``--`` goes to every part that is named:

    python -m benchmarks.run_gpu --parts step -- --models Llama-3.1-8B --modes compiled

The exit status is that of the worst part.
"""

import argparse
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
)

BUDGET = 570.0
PARTS = {
    "tests": 2.0,
    "linear": 2.5,
    "block": 1.5,
    "step": 4.0,
    "memory": 1.5,
    "gemm": 1.0,
    "optimizer": 1.0,
}
"""Name -> weight of its share in the time that is left to it and those after it."""
GRACE = 20.0
"""Seconds before the end of its share in which a part begins nothing new."""


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
        command = [*command_of(name, results), *(toy if name != "tests" else [])]
        began = time.monotonic()
        status, result = run_part(name, [*command, *arguments.options], seconds)
        statuses.append(status)
        spent = round(time.monotonic() - began, 1)
        table.add([{"part": name, "seconds": spent, "result": result}])
        print(f"== {name}: {result} in {spent} s", flush=True)
    sys.exit(max(statuses))


def command_of(name: str, results: Path) -> list[str]:
    """The command of a part; without a card the GPU tests are only collected."""
    if name == "tests":
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")]
        return command if torch.cuda.is_available() else [*command, "--collect-only"]
    csv = str(results / f"{name}.csv")
    return [sys.executable, "-m", f"benchmarks.bench_{name}", "--csv", csv]


def run_part(name: str, command: list[str], seconds: float) -> tuple[int, str]:
    """Run one part -> (exit status, one line on how it went)."""
    print(f"== {name}: up to {seconds:.0f} s", flush=True)
    if name != "tests":
        command = [*command, "--budget", f"{max(seconds - GRACE, 0.5 * seconds):.0f}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        # As from the keyboard: pytest then reports what it has run so far.
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=GRACE / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        print(output, flush=True)
        return 1, f"ended after {seconds:.0f} s{_counted(name, output)}"
    print(output, flush=True)
    if name == "tests" and _counted(name, output):
        return process.returncode, _counted(name, output).removeprefix(", ")
    status = process.returncode
    return status, "done" if status == 0 else f"exit status {status}"


def _counted(name: str, output: str) -> str:
    """What pytest says that it has run."""
    last = (output.strip().splitlines() or [""])[-1]
    found = re.search(r"\d+ (passed|failed|error|tests? collected|deselected).*", last)
    return f", {found.group(0).strip('= ')}" if name == "tests" and found else ""


if __name__ == "__main__":
    main()
