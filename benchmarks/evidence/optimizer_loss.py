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
from pathlib import Path

from benchmarks.evidence import recipes_loss
from benchmarks.evidence.recipes_loss import RUN, SCRIPT, measure, print_means
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
            script, config = command(level, seed)
            result = measure([*script, *arguments.script_arguments], config)
            baseline = rows.get((run, BASELINE, seed))
            row = {"run": run, "level": level, "seed": seed, **as_columns(result, baseline)}
            append_rows(arguments.csv, COLUMNS, [row])
            print(f"  {result['seconds']:.0f} s, {row['final_eval_loss']} ({row['rel_diff']})")
    rows = read_rows(arguments.csv)
    print_means({(level, seed): row for (r, level, seed), row in rows.items() if r == run})


def fine_tuning(level: str, seed: int) -> tuple[list[str], dict[str, object]]:
    """Return the arguments of python and the configuration of a run of fine-tuning."""
    precision = BASELINE if level == BASELINE else "fp8-mixed"
    config = {} if level == BASELINE else {"opt_level": level}
    script = [SCRIPT, "--precision", precision, *RUN, "--seed", str(seed)]
    return script, config


def pretraining(level: str, seed: int) -> tuple[list[str], dict[str, object]]:
    """Return the arguments of python and the configuration of a run of pre-training."""
    arguments = [] if level == BASELINE else ["--level", level]
    if level in PERTURBED:
        arguments = ["--perturbed", str(PERTURBED[level])]
    return ["-m", "benchmarks.evidence.pretraining", *arguments, "--seed", str(seed)], {}


def as_columns(result: dict, baseline: dict | None) -> dict:
    """Return the columns of a result; see `recipes_loss.as_columns`."""
    return {
        "steps": result["steps"],
        "bytes_per_parameter": f"{result['bytes_per_parameter']:.2f}",
        **recipes_loss.as_columns(result, baseline),
    }


def read_rows(path: Path) -> dict[tuple[str, str, int], dict]:
    """Return the CSV's rows by (run, level, seed)."""
    return {(r["run"], r["level"], int(r["seed"])): r for r in read_csv(path)}


if __name__ == "__main__":
    main()
