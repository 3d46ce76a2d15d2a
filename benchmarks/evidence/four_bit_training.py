"""Losses with Adam's first moment in 4 bits against those with 8, seed by seed, as CSV.

    python -m benchmarks.evidence.four_bit_training small-models
    python -m benchmarks.evidence.four_bit_training pretraining

``small-models`` are those of `small_models_loss`, 30 steps at level O2, with learning rates of 0.3,
1 and 3 times its own; ``pretraining`` is that of `pretraining`, 3,000 steps. A finished run becomes
a row of the CSV at once, and a row that is there is not run again.
"""

import argparse
import datetime
import itertools
import math
import statistics
from typing import Any

import torch

from benchmarks.evidence import pretraining, small_models_loss
from benchmarks.evidence.recipes_loss import commit
from benchmarks.rows import add_csv, append_rows, read_rows, tell_kept
from torch_fp8 import FP8Config

RATES = (1.0, 0.3, 3.0)
KEY = ("experiment", "model", "lr_factor", "seed", "moment_bits")
COLUMNS = (*KEY, "loss", "torch", "commit", "date", "command")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=["small-models", "pretraining"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    add_csv(parser, "four_bit_training")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    torch.set_num_threads(1)
    experiment = arguments.experiment
    cases = list(itertools.product(RATES, small_models_loss.MODELS))
    if experiment == "pretraining":
        cases = [(1.0, "llama, 0.5M")]
    for seed, (rate, model), bits in itertools.product(arguments.seeds, cases, (8, 4)):
        key = [experiment, model, f"{rate:g}", str(seed), str(bits)]
        if key in ([row[name] for name in KEY] for row in read_rows(arguments.csv)):
            continue
        row = dict(zip(KEY, key, strict=True)) | {"loss": f"{loss(model, rate, seed, bits):.6f}"}
        row |= {"torch": torch.__version__, "commit": commit()}
        row |= {"date": f"{datetime.date.today():%Y-%m-%d}"}
        row |= {"command": f"python -m benchmarks.evidence.four_bit_training {experiment}"}
        append_rows(arguments.csv, COLUMNS, [row])
    print_summary(read_rows(arguments.csv))


def loss(model: str, rate: float, seed: int, bits: int) -> float:
    """Return the loss after training."""
    config = FP8Config(moment_bits=bits)
    if model not in small_models_loss.MODELS:
        return float(pretraining.pretrain(config, seed, pretraining.STEPS)["final_eval_loss"])
    small_models_loss.LEARNING_RATE = 2e-3 * rate
    small_models_loss.RUNS["four bits"] = config, config
    return small_models_loss.train(model, "four bits", seed)


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print the mean difference of 4 bits to 8, as a share of the loss, and its standard error."""
    for case, (mean, error, seeds) in differences(rows).items():
        print(f"{case[0]:12} lr x {case[1]:4} {mean:+.3%} +- {error:.3%} ({seeds} seeds)")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the differences of the small models as docs/results.md has them."""
    small = differences([row for row in rows if row["experiment"] == "small-models"])
    lines = []
    for model in small_models_loss.MODELS:
        cells = [small[model, f"{rate:g}"] for rate in sorted(RATES)]
        shown = [f"{100 * mean:+.2f} ± {100 * error:.2f} %" for mean, error, _ in cells]
        lines.append(f"| {model} | {' | '.join(shown)} |")
    return "\n".join(lines)


def differences(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, float, int]]:
    """Return mean, standard error and number of seeds of each model's and rate's difference."""
    losses = {tuple(row[name] for name in KEY[1:]): float(row["loss"]) for row in rows}
    pairs: dict[tuple[str, str], list[float]] = {}
    for (model, rate, seed, bits), value in losses.items():
        if bits == "4" and (model, rate, seed, "8") in losses:
            reference = losses[model, rate, seed, "8"]
            pairs.setdefault((model, rate), []).append(value / reference - 1)
    return {
        case: (
            statistics.mean(values),
            statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan,
            len(values),
        )
        for case, values in pairs.items()
    }


if __name__ == "__main__":
    main()
