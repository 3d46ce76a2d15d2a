"""Evaluation loss on two ranks whose gradients travel in 8 bits, against BF16 on two ranks.

    python -m benchmarks.evidence.wire_loss        # from the repository's root

The fine-tuning of comparison/sft_lightning.py, unmodified: Lightning takes the number of processes
from ``PL_TRAINER_DEVICES`` and starts the second one itself, on the CPU with gloo. With one
micro-batch for each rank instead of two on one, a step sees the same rows as the one process of
optimizer_loss.py, so its rows are what one rank gets on the same data. A finished run
becomes a row of the CSV at once, and a row that is there is not run again.
"""

import argparse
import datetime
import os
from pathlib import Path

from benchmarks.evidence import optimizer_loss
from benchmarks.evidence.optimizer_loss import BASELINE, FINE_TUNING
from benchmarks.evidence.recipes_loss import RUN, SCRIPT, measure
from benchmarks.rows import RESULTS, add_csv, append_rows, tell_kept
from benchmarks.rows import read_rows as read_csv

RANKS = 2
RUNS = {
    BASELINE: None,
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3"},
    "O2, off": {"opt_level": "O2", "communication": "off"},
}
DEFAULT = [BASELINE, "O2", "O3"]
COLUMNS = [
    "run",
    "seed",
    "ranks",
    "steps",
    "final_train_loss",
    "final_eval_loss",
    "bf16_eval_loss",
    "rel_diff",
    "one_rank_eval_loss",
    "rel_diff_to_one_rank",
    "torch",
    "commit",
    "date",
    "command",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=DEFAULT)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    add_csv(parser, "wire_loss")
    parser.add_argument("script_arguments", nargs="*", help="for the script, after --")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    os.environ["PL_TRAINER_DEVICES"] = str(RANKS)
    one_rank = optimizer_loss.read_rows(RESULTS / "optimizer_loss.csv")
    for seed in arguments.seeds:
        for run in dict.fromkeys([BASELINE, *arguments.runs]):
            rows = read_rows(arguments.csv)
            if (run, seed) in rows:
                continue
            print(f"{datetime.datetime.now():%H:%M:%S} {run} seed {seed}", flush=True)
            config = RUNS[run] or {}
            result = measure([*command(run, seed), *arguments.script_arguments], config)
            result["command"] = f"PL_TRAINER_DEVICES={RANKS} {result['command']}"
            level = run.partition(",")[0]
            row = as_columns(
                result, rows.get((BASELINE, seed)), one_rank.get((FINE_TUNING, level, seed))
            )
            append_rows(arguments.csv, COLUMNS, [{"run": run, "seed": seed, "ranks": RANKS, **row}])
            print(f"  {result['seconds']:.0f} s, {row['final_eval_loss']} ({row['rel_diff']})")
    for (run, seed), row in read_rows(arguments.csv).items():
        print(
            f"{run:12} seed {seed}  {row['final_eval_loss']}  to BF16 {row['rel_diff']}"
            f"  to one rank {row['rel_diff_to_one_rank']}"
        )


def command(run: str, seed: int) -> list[str]:
    """Return a run's arguments of python: one micro-batch for each rank."""
    precision = BASELINE if RUNS[run] is None else "fp8-mixed"
    return [
        *(SCRIPT, "--precision", precision, *RUN, "--seed", str(seed)),
        *("--accumulate", "1"),
    ]


def as_columns(result: dict, baseline: dict | None, one_rank: dict | None) -> dict:
    """Return the columns of a row.

    Args:
        result: of the run.
        baseline: the row of BF16 on as many ranks; None for that row itself.
        one_rank: the row of optimizer_loss.py for the level and seed, if it is there.
    """
    row = optimizer_loss.as_columns(result, baseline)
    alone = "" if one_rank is None else one_rank["final_eval_loss"]
    row["one_rank_eval_loss"] = alone
    loss = result["final_eval_loss"]
    row["rel_diff_to_one_rank"] = f"{loss / float(alone) - 1:+.6f}" if alone else ""
    del row["bytes_per_parameter"]
    return row


def read_rows(path: Path) -> dict[tuple[str, int], dict]:
    """Return the CSV's rows by (run, seed)."""
    return {(row["run"], int(row["seed"])): row for row in read_csv(path)}


if __name__ == "__main__":
    main()
