"""Everything that awaits a GPU, in one command and under ten minutes.

    python benchmarks/run_gpu.py            # GPU tests, optimizer, training step, linears
    python benchmarks/run_gpu.py --toy      # the same at toy size, also on a CPU

Each part is a process of its own that gets its share of the time and writes its CSV as it goes:
gpu_run.csv, optimizer.csv, step.csv and linear.csv under benchmarks/results. The exit status is
that of the worst part.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from measurement import ENVIRONMENT, RESULTS, ROOT, default_device, environment, write_rows

COLUMNS = ("part", "seconds", "result", *ENVIRONMENT)
BUDGET = 570.0
# Of the time that is left; the linears get the rest.
TEST_SHARE, OPTIMIZER_SHARE, STEP_SHARE = 0.4, 0.2, 0.4
GRACE = 20.0  # seconds that a part may overrun before it is ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="toy sizes, also on a CPU")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error("there is no GPU here; --toy runs everything at toy size on the CPU")
    arguments.results.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.budget
    about, rows = environment(default_device()), []

    def part(name: str, share: float, command: list[str]) -> int:
        seconds = share * (deadline - time.monotonic())
        began = time.monotonic()
        status, result = run_part(name, command, seconds)
        spent = round(time.monotonic() - began, 1)
        rows.append({"part": name, "seconds": spent, "result": result, **about})
        write_rows(arguments.results / "gpu_run.csv", COLUMNS, rows)
        print(f"== {name}: {result} in {spent} s", flush=True)
        return status

    toy = ["--toy"] if arguments.toy else []
    statuses = [part("tests", TEST_SHARE, test_command(torch.cuda.is_available()))]
    for name, share in (("optimizer", OPTIMIZER_SHARE), ("step", STEP_SHARE), ("linear", 1.0)):
        csv = arguments.results / f"{name}.csv"
        statuses.append(part(name, share, benchmark(f"bench_{name}.py", csv, toy)))
    sys.exit(max(statuses))


def test_command(card: bool) -> list[str]:
    """The GPU tests; without a card they are only collected."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")]
    return command if card else [*command, "--collect-only"]


def benchmark(script: str, csv: Path, arguments: list[str]) -> list[str]:
    """The command of one benchmark; its budget is added when it starts."""
    path = str(Path(__file__).with_name(script))
    return [sys.executable, path, "--csv", str(csv), *arguments, "--budget"]


def run_part(name: str, command: list[str], seconds: float) -> tuple[int, str]:
    """Run one part -> (exit status, one line on how it went)."""
    print(f"== {name}: up to {seconds:.0f} s", flush=True)
    if command[-1] == "--budget":
        command = [*command, f"{seconds - GRACE:.0f}"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=seconds, stdout=subprocess.PIPE, text=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        print(error.stdout.decode() if error.stdout else "", flush=True)
        return 1, f"ended after {seconds:.0f} s"
    print(done.stdout, flush=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counted = re.search(r"\d+ (passed|failed|error|tests? collected|deselected).*", last)
    if name == "tests" and counted:
        return done.returncode, counted.group(0).strip("= ")
    return done.returncode, "done" if done.returncode == 0 else f"exit status {done.returncode}"


if __name__ == "__main__":
    main()
