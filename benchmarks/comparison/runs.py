"""The runs of a comparison, one after the other, and the table of what they left behind."""

import argparse
import csv
import json
import shlex
from pathlib import Path

import child_process


def add_bf16_products(parser: argparse.ArgumentParser) -> None:
    """Add the option that all comparisons have in common."""
    parser.add_argument(
        "--bf16-products",
        choices=["bf16", "float32"],
        help="how a CPU computes products of BF16, in both precisions: as torch does, or in "
        "float32, rounded once; none: in float32 if that takes at most half the time here",
    )


def run_each(commands: dict[str, list[str]], output: Path) -> dict[str, dict]:
    """Run each precision's command into `output`/<precision>; return each one's result.json.

    Args:
        commands: precision -> command, to which `--output` is added. The others compute BF16
            products as the first one chose to.
        output: folder of the comparison.
    Raises:
        SystemExit: one of the runs failed; its own error stands above.
    """
    results: dict[str, dict] = {}
    choice: list[str] = []
    for precision, command in commands.items():
        command = [*command, *choice, "--started-by-comparison"]
        command += ["--output", str(output / precision)]
        print(f"\n=== {precision}: {shlex.join(command)}\n", flush=True)
        if status := child_process.run(command):
            raise SystemExit(status)
        results[precision] = json.loads((output / precision / "result.json").read_text())
        choice = ["--bf16-products", results[precision]["bf16_products"]]
    return results


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
