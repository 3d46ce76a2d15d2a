"""Evaluation loss of pretraining at the levels O1, O2 and O3 against BF16 with a float32 AdamW.

    python -m benchmarks.evidence.optimizer_loss    # 3,000 steps of `pretraining`, from the root

Each run has its own process. A finished run becomes a row of the CSV at once, and an existing row
is not run again, so you can continue an interrupted benchmark. The rows
``fine-tuning`` of the committed CSV come from a script in commit 9b7d5a8.
"""

import argparse
import datetime
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.rows import ROOT, add_csv, append_rows, commit, tell_kept
from benchmarks.rows import read_rows as read_csv

BASELINE = "bf16-mixed"
LEVELS = ["O1", "O2", "O3"]
PERTURBED = {f"{BASELINE}, perturbed by {n}e-6": n for n in (1, 2, 3)}
RUN = "pretraining"
BAND = 0.005  # of the evaluation loss, mean over the seeds
COLUMNS = [
    *("run", "level", "seed", "steps", "bytes_per_parameter"),
    *("final_train_loss", "final_eval_loss", "bf16_eval_loss", "rel_diff"),
    *("torch", "commit", "date", "command"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=[*LEVELS, *PERTURBED], default=LEVELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add_csv(parser, "optimizer_loss")
    parser.add_argument("script_arguments", nargs="*", help="for `pretraining`, after --")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    for seed in arguments.seeds:  # outside: an interrupted benchmark has compared every level
        for level in (BASELINE, *arguments.levels):
            rows = read_rows(arguments.csv)
            if (level, seed) in rows:
                continue
            print(f"{datetime.datetime.now():%H:%M:%S} {level} seed {seed}", flush=True)
            result = measure([*pretraining(level, seed), *arguments.script_arguments])
            columns = as_columns(result, rows.get((BASELINE, seed)))
            row = {"run": RUN, "level": level, "seed": seed, **columns}
            append_rows(arguments.csv, COLUMNS, [row])
            print(f"  {result['seconds']:.0f} s, {row['final_eval_loss']} ({row['rel_diff']})")
    print_means(read_rows(arguments.csv))


def pretraining(level: str, seed: int) -> list[str]:
    """Return the arguments of python for a run of pretraining."""
    arguments = [] if level == BASELINE else ["--level", level]
    if level in PERTURBED:
        arguments = ["--perturbed", str(PERTURBED[level])]
    return ["-m", "benchmarks.evidence.pretraining", *arguments, "--seed", str(seed)]


def measure(arguments: list[str]) -> dict:
    """Run Python once and return the result that it writes, with its command.

    Args:
        arguments: arguments of python, without the folder of the result.
    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as output:
        run = subprocess.run(
            [sys.executable, *arguments, "--output", output],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"python {shlex.join(arguments)} failed:\n{run.stdout[-4000:]}")
        result = json.loads((Path(output) / "result.json").read_text())
    return {**result, "command": f"python {shlex.join(arguments)}"}


def as_columns(result: dict, baseline: dict | None) -> dict:
    """Return the columns of a result.

    Args:
        result: the result that `measure` returned.
        baseline: the BF16 row of the same seed, or None for that row itself.
    """
    loss = result["final_eval_loss"]
    bf16_loss = loss if baseline is None else float(baseline["bf16_eval_loss"])
    return {
        "steps": result["steps"],
        "bytes_per_parameter": f"{result['bytes_per_parameter']:.2f}",
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
    """Return the CSV's rows of pretraining by (level, seed)."""
    return {(r["level"], int(r["seed"])): r for r in read_csv(path) if r["run"] == RUN}


def print_means(rows: dict[tuple[str, int], dict]) -> None:
    """Print each level's difference from BF16: mean over seeds, standard error, and extremes."""
    titles = {"seeds": 6, "eval loss": 11, "mean": 10, "std. err.": 11, "min": 10, "max": 10}
    print(f"{'level':12}" + "".join(title.rjust(width) for title, width in titles.items()))
    for level in dict.fromkeys(name for name, _ in rows):
        of_level = [row for (name, _), row in rows.items() if name == level]
        differences = [float(row["rel_diff"]) for row in of_level]
        mean, several = statistics.mean(differences), len(differences) > 1
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if several else math.nan
        loss = statistics.mean(float(row["final_eval_loss"]) for row in of_level)
        verdict = "" if abs(mean) <= BAND else f"  outside of {BAND:.1%}"
        print(
            f"{level:12}{len(differences):6}{loss:11.4f}{mean:+10.3%}{error:11.3%}"
            f"{min(differences):+10.3%}{max(differences):+10.3%}{verdict}"
        )


if __name__ == "__main__":
    main()
