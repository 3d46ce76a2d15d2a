"""Evaluation loss of each FP8 recipe against BF16, in the fine-tuning of the comparison.

    python -m benchmarks.evidence.recipes_loss

Every run is the unmodified script in a process of its own, with the recipe in TORCH_FP8_CONFIG. A
finished run becomes a row of the CSV at once, and a row that is there is not run again, so an
interrupted benchmark goes on where it was.
"""

import argparse
import datetime
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.rows import add_csv, append_rows, tell_kept
from benchmarks.rows import read_rows as read_csv

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "bf16-mixed"
RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]
SCRIPT = "benchmarks/comparison/sft_lightning.py"
RUN = ["--pretraining-steps", "1000", "--steps", "80", "--eval-examples", "160"]
"""The script's arguments, whatever its defaults: rows are to be comparable."""
BAND = 0.005  # of the evaluation loss, mean over the seeds
COLUMNS = [
    "recipe",
    "seed",
    "final_train_loss",
    "final_eval_loss",
    "bf16_eval_loss",
    "rel_diff",
    "torch",
    "commit",
    "date",
    "command",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add_csv(parser, "recipes_loss")
    parser.add_argument(
        "script_arguments", nargs="*", help="for benchmarks/comparison/sft_lightning.py, after --"
    )
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    for seed in arguments.seeds:  # outside: an interrupted benchmark has compared every recipe
        for recipe in (BASELINE, *arguments.recipes):
            rows = read_rows(arguments.csv)
            if (recipe, seed) in rows:
                continue
            print(f"{datetime.datetime.now():%H:%M:%S} {recipe} seed {seed}", flush=True)
            precision = BASELINE if recipe == BASELINE else "fp8-mixed"
            config = {} if recipe == BASELINE else {"recipe": recipe}
            script = [SCRIPT, "--precision", precision, *RUN, "--seed", str(seed)]
            result = measure([*script, *arguments.script_arguments], config)
            columns = as_columns(result, rows.get((BASELINE, seed)))
            append_rows(arguments.csv, COLUMNS, [{"recipe": recipe, "seed": seed, **columns}])
            loss, difference = columns["final_eval_loss"], columns["rel_diff"]
            print(f"  {result['seconds']:.0f} s, {loss} ({difference})", flush=True)
    print_means(read_rows(arguments.csv))


def measure(script: list[str], config: dict[str, object]) -> dict:
    """Run a script once and return its result, with its command.

    Args:
        script: arguments of python, without the folder of the results.
        config: fields of `FP8Config`; none: the environment names no configuration.
    Raises:
        RuntimeError: the script failed; with the end of what it said.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_FP8_CONFIG"}
    prefix = ""
    if config:
        environment["TORCH_FP8_CONFIG"] = json.dumps(config)
        prefix = f"TORCH_FP8_CONFIG={shlex.quote(environment['TORCH_FP8_CONFIG'])} "
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, *script, "--output", output]
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"{prefix}{shlex.join(command)} failed:\n{run.stdout[-4000:]}")
        result = json.loads((Path(output) / "result.json").read_text())
    return {**result, "command": f"{prefix}python {shlex.join(script)}"}


def as_columns(result: dict, baseline: dict | None) -> dict:
    """Return the columns of a result.

    Args:
        result: what `measure` returned.
        baseline: the BF16 row of the same seed; None for that row itself.
    """
    loss = result["final_eval_loss"]
    bf16_loss = loss if baseline is None else float(baseline["bf16_eval_loss"])
    return {
        "final_train_loss": f"{result['final_train_loss']:.6f}",
        "final_eval_loss": f"{loss:.6f}",
        "bf16_eval_loss": f"{bf16_loss:.6f}",
        "rel_diff": f"{loss / bf16_loss - 1:+.6f}",
        "torch": torch.__version__,
        "commit": commit(),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "command": result["command"],
    }


def read_rows(path: Path) -> dict[tuple[str, int], dict]:
    """Return the CSV's rows by (recipe, seed)."""
    return {(row["recipe"], int(row["seed"])): row for row in read_csv(path)}


def print_means(rows: dict[tuple[str, int], dict]) -> None:
    """Print each recipe's difference to BF16: mean over seeds, its standard error, and extremes."""
    titles = {"seeds": 6, "eval loss": 11, "mean": 10, "std. err.": 11, "min": 10, "max": 10}
    print(f"{'recipe':12}" + "".join(title.rjust(width) for title, width in titles.items()))
    for recipe in dict.fromkeys(name for name, _ in rows):
        of_recipe = [row for (name, _), row in rows.items() if name == recipe]
        differences = [float(row["rel_diff"]) for row in of_recipe]
        mean = statistics.mean(differences)
        error = (
            statistics.stdev(differences) / math.sqrt(len(differences))
            if len(differences) > 1
            else math.nan
        )
        loss = statistics.mean(float(row["final_eval_loss"]) for row in of_recipe)
        verdict = "" if abs(mean) <= BAND else f"  outside of {BAND:.1%}"
        print(
            f"{recipe:12}{len(differences):6}{loss:11.4f}{mean:+10.3%}{error:11.3%}"
            f"{min(differences):+10.3%}{max(differences):+10.3%}{verdict}"
        )


def commit() -> str:
    """Return the short hash of HEAD, or 'unknown' outside of a checkout."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return git.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
