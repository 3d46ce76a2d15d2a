"""The runs of a comparison, one after the other, and the table of what they left behind."""

import csv
import json
import shlex
from pathlib import Path

import child_process


def run_each(commands: dict[str, list[str]], output: Path) -> dict[str, dict]:
    """Run each precision's command into `output`/<precision>; return each one's result.json.

    Args:
        commands: precision -> command, to which `--output` is added.
        output: folder of the comparison.
    Raises:
        SystemExit: one of the runs failed; its own error stands above.
    """
    for precision, command in commands.items():
        command = [*command, "--started-by-comparison", "--output", str(output / precision)]
        print(f"\n=== {precision}: {shlex.join(command)}\n", flush=True)
        if status := child_process.run(command):
            raise SystemExit(status)
    return {p: json.loads((output / p / "result.json").read_text()) for p in commands}


def say_where(results: dict[str, dict]) -> None:
    """Print that seconds of an emulated run say nothing about a GPU."""
    if next(iter(results.values()))["device"] == "cpu":
        print("On a CPU FP8 is emulated: the seconds say nothing about its speed on a GPU.")


def table(lines: list[list[str]]) -> str:
    """Align the cells of `lines` to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def write(path: Path, rows: list[dict]) -> None:
    """Write rows with the same columns as a CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
