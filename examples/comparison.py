"""The same fine-tuning in two precisions, one after the other: a table, a CSV and a picture."""

import csv
import json
import os
import shlex
import subprocess
from pathlib import Path

import matplotlib

from run_record import read_losses

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = {
    "precision": "precision",
    "train loss": "final_train_loss",
    "eval loss before": "first_eval_loss",
    "eval loss after": "final_eval_loss",
    "difference": "difference",
    "FP8 linears": "fp8_linears",
    "bytes/param": "bytes_per_parameter",
    "seconds": "seconds",
}


def compare(commands: dict[str, list[str]], output: Path) -> list[dict]:
    """Run each precision's command into `output`/<precision>, then print and write what came out.

    Args:
        commands: precision -> command, to which `--output` is added; the others are compared to
            the first one.
        output: gets comparison.csv and comparison.png beside the runs' own folders.
    Returns:
        the rows of the table.
    Raises:
        SystemExit: one of the runs failed; its own error stands above.
    """
    for precision, command in commands.items():
        command = [*command, "--output", str(output / precision)]
        print(f"\n=== {precision}: {shlex.join(command)}\n", flush=True)
        if code := subprocess.run(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode:
            raise SystemExit(code)
    results = {p: json.loads((output / p / "result.json").read_text()) for p in commands}
    rows = table_rows(results)
    with (output / "comparison.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS.values()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    plot({p: read_losses(output / p / "losses.csv") for p in commands}, output / "comparison.png")
    print("\n" + format_table(rows))
    if results[next(iter(commands))]["device"] == "cpu":
        print("On a CPU FP8 is emulated: the seconds say nothing about its speed on a GPU.")
    print(f"Curves: {output / 'comparison.png'}   numbers: {output / 'comparison.csv'}")
    return rows


def table_rows(results: dict[str, dict]) -> list[dict]:
    """Return one row per run; `difference` is its last evaluation loss / the first run's - 1."""
    reference = next(iter(results.values()))["final_eval_loss"]
    rows = []
    for precision, result in results.items():
        linears = result["linear_layers"]
        fp8 = sum(count for kind, count in linears.items() if kind.startswith("Float8"))
        derived = {
            "precision": precision,
            "difference": result["final_eval_loss"] / reference - 1,
            "fp8_linears": f"{fp8} of {sum(linears.values())}",
        }
        rows.append({key: derived.get(key, result.get(key)) for key in COLUMNS.values()})
    return rows


def format_table(rows: list[dict]) -> str:
    formats = {
        "final_train_loss": "{:.4f}",
        "first_eval_loss": "{:.4f}",
        "final_eval_loss": "{:.4f}",
        "difference": "{:+.2%}",
        "bytes_per_parameter": "{:.2f}",
        "seconds": "{:.0f}",
    }
    cells = [[formats.get(key, "{}").format(row[key]) for key in COLUMNS.values()] for row in rows]
    lines = [list(COLUMNS), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def plot(curves: dict[str, list[dict]], path: Path) -> None:
    """Draw training losses as thin lines and evaluation losses as thick ones with marks."""
    figure, axes = plt.subplots(figsize=(8, 5))
    for i, (precision, rows) in enumerate(curves.items()):
        for key, style in (
            ("loss", {"alpha": 0.4, "lw": 1}),
            ("eval_loss", {"marker": "o", "lw": 2}),
        ):
            points = [(row["step"], row[key]) for row in rows if key in row]
            name = f"{precision}, {'training' if key == 'loss' else 'evaluation'}"
            axes.plot(
                *zip(*points, strict=True),
                color=f"C{i}",
                linestyle="--" if i else "-",
                label=name,
                **style,
            )
    axes.set(
        xlabel="optimizer step",
        ylabel="loss, nats per answer token",
        title="Supervised fine-tuning",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
