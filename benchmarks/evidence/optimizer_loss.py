"""Evaluation loss of the levels O1, O2 and O3 against BF16 with a float32 AdamW.

    python -m benchmarks.evidence.optimizer_loss  # fine-tuning, comparison/sft_lightning.py
    python -m benchmarks.evidence.optimizer_loss --pretraining  # 3,000 steps, `pretraining`

Both from the repository's root.
Every run is a process of its own, the fine-tuning with the unmodified script and the level in
TORCH_FP8_CONFIG. A finished run becomes a row of the CSV at once, and a row that is there is not
run again, so an interrupted benchmark goes on where it was.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.evidence.recipes_loss import ROOT, RUN, SCRIPT, commit, print_means
from benchmarks.rows import add_csv, append_rows, tell_kept
from benchmarks.rows import read_rows as read_csv

BASELINE = "bf16-mixed"
LEVELS = ["O1", "O2", "O3"]
PERTURBED = {f"{BASELINE}, perturbed by {n}e-6": n for n in (1, 2, 3)}
FINE_TUNING, PRETRAINING = "fine-tuning", "pretraining"
BAND = 0.005  # of the evaluation loss, mean over the seeds
COLUMNS = [
    "run",
    "level",
    "seed",
    "steps",
    "bytes_per_parameter",
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
    parser.add_argument("--levels", nargs="+", choices=[*LEVELS, *PERTURBED], default=LEVELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add_csv(parser, "optimizer_loss")
    parser.add_argument("--pretraining", action="store_true")
    parser.add_argument("script_arguments", nargs="*", help="for the script, after --")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    if not arguments.pretraining and not PERTURBED.keys().isdisjoint(arguments.levels):
        parser.error("perturbed runs are of --pretraining")
    run = PRETRAINING if arguments.pretraining else FINE_TUNING
    for seed in arguments.seeds:  # outside: an interrupted benchmark has compared every level
        for level in (BASELINE, *arguments.levels):
            rows = read_rows(arguments.csv)
            if (run, level, seed) in rows:
                continue
            print(f"{datetime.datetime.now():%H:%M:%S} {run} {level} seed {seed}", flush=True)
            command = pretraining if arguments.pretraining else fine_tuning
            result = measure(*command(level, seed), arguments.script_arguments)
            baseline = rows.get((run, BASELINE, seed))
            row = {"run": run, "level": level, "seed": seed, **as_columns(result, baseline)}
            append_rows(arguments.csv, COLUMNS, [row])
            print(f"  {result['seconds']:.0f} s, {row['final_eval_loss']} ({row['rel_diff']})")
    rows = read_rows(arguments.csv)
    print_means({(level, seed): row for (r, level, seed), row in rows.items() if r == run})


def fine_tuning(level: str, seed: int) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of python and the environment of a run of fine-tuning."""
    precision = BASELINE if level == BASELINE else "fp8-mixed"
    config = {} if level == BASELINE else {"TORCH_FP8_CONFIG": json.dumps({"opt_level": level})}
    script = [SCRIPT, "--precision", precision, *RUN, "--seed", str(seed)]
    return script, config


def pretraining(level: str, seed: int) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of python and the environment of a run of pre-training."""
    arguments = [] if level == BASELINE else ["--level", level]
    if level in PERTURBED:
        arguments = ["--perturbed", str(PERTURBED[level])]
    return ["-m", "benchmarks.evidence.pretraining", *arguments, "--seed", str(seed)], {}


def measure(script: list[str], config: dict[str, str], script_arguments: list[str]) -> dict:
    """Run it once and return its result, with its command.

    Raises:
        RuntimeError: the script failed; with the end of what it said.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_FP8_CONFIG"} | config
    prefix = "".join(f"{name}={shlex.quote(value)} " for name, value in config.items())
    script = [*script, *script_arguments]
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


def read_rows(path: Path) -> dict[tuple[str, str, int], dict]:
    """Return the CSV's rows by (run, level, seed)."""
    return {(r["run"], r["level"], int(r["seed"])): r for r in read_csv(path)}


if __name__ == "__main__":
    main()
