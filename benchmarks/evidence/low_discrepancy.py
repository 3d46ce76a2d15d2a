"""Rounding weights and moments by a low-discrepancy sequence instead of random numbers, as CSV.

    nice -n 19 python -m benchmarks.evidence.low_discrepancy      # from the repository's root

A value is rounded up where its fraction exceeds a threshold in [0, 1). With random numbers the
threshold is another one each time; here it is ``frac(hash(index) + step * golden ratio)``, which
over any few steps is spread more evenly. The hash changes every 4,096 steps. Weight, residual and
both moments have a sequence each.

* ``updates``: cosine and ratio of norms of what 2,000 steps have moved, against float32, as of
  `benchmarks.evidence.updates`.
* A model's name: its loss after 30 steps at O2 from ten seeds, as of
  `benchmarks.evidence.small_models_loss`, once with random numbers and once with the sequence.

It was to replace the random numbers if ``updates`` did not fall and the losses did not change.
"""

import argparse
import contextlib
import datetime
import statistics
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from benchmarks.evidence import small_models_loss, updates
from benchmarks.evidence.recipes_loss import commit
from benchmarks.rows import add_csv, append_rows, read_rows, tell_kept
from torch_fp8.quantization import stochastic_rounding

RANDOM, SEQUENCE = "random", "sequence"
STORES = ("residual_8", "residual_4", "o2_8", "o2_4", "o3_8", "o3_4")
MODELS = ("llama", "gemma3", "t5", "distilbert", "qwen3_moe")
COLUMNS = (
    *("experiment", "store", "lr", "rounding", "seed", "cosine", "norm_ratio", "loss"),
    *("torch", "commit", "date", "command"),
)
KEY = COLUMNS[:5]
GOLDEN = 2654435769
"""2^32 times the golden ratio's fractional part."""
PERIOD = 4096


def thresholds(index: Tensor, keys: tuple[int, int], stream: int) -> Tensor:
    """Return 32-bit thresholds as int64 in [0, 2^32).

    Args:
        index: int32, the elements' indices.
        keys: a parameter's number, and the step.
        stream: number of the kind of value that is rounded; each kind has its own sequence.
    """
    parameter, step = keys
    named = stochastic_rounding.stream_keys(parameter, stream, step // PERIOD)
    hashed = stochastic_rounding.random_words(index, named).to(torch.int64)
    return (hashed + step * GOLDEN) & 0xFFFFFFFF


def words(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """Return words whose bits 0 to 7, 8 to 15 and 16 to 31 are the upper ones of a threshold."""
    residual, first, second = (thresholds(index, keys, stream) for stream in range(3))
    word = second >> 16 << 16 | first >> 24 << 8 | residual >> 24
    return (word - ((word >> 31) << 32)).to(torch.int32)


def few_bits(word: Tensor, keys: tuple[int, int]) -> Tensor:
    """Return what rounds residuals of four bits, which drop twelve, for an element's `words`."""
    rows, cols = word.shape
    index = stochastic_rounding.element_index(rows, cols, 0, 0, cols, word.device)
    return (thresholds(index, keys, 3) >> 20).to(torch.int32)


def counters(*numbers: int) -> tuple[int, int]:
    """Return the parameter's number and the step, of (seed, step, parameter, ...)."""
    return numbers[2] & 0xFFFF, numbers[1] & 0x7FFFFFFF


@contextlib.contextmanager
def rounding(name: str) -> Iterator[None]:
    """Have the optimizer's step round by random numbers or by the sequence."""
    with contextlib.ExitStack() as stack:
        for module in ("torch_fp8.ops.adamw", MODULE_OF_UPDATES) if name == SEQUENCE else ():
            stack.enter_context(mock.patch(f"{module}.random_words", words))
            stack.enter_context(mock.patch(f"{module}.second_words", few_bits))
        for module in ("torch_fp8.optim.step", MODULE_OF_UPDATES) if name == SEQUENCE else ():
            stack.enter_context(mock.patch(f"{module}.stream_keys", counters))
        yield


MODULE_OF_UPDATES = "benchmarks.evidence.updates"


def cases(seeds: list[int], models: list[str]) -> Iterator[dict[str, object]]:
    """Yield the first columns of each row."""
    for seed in seeds:
        for model in models:
            for name in (RANDOM, SEQUENCE):
                yield {"experiment": model, "store": "", "lr": "", "rounding": name, "seed": seed}
    for lr in updates.RATES:
        for store in STORES:
            for name in (RANDOM, SEQUENCE):
                yield dict(zip(KEY, ("updates", store, lr, name, ""), strict=True))


def measure(case: dict[str, object], steps: int) -> dict[str, object]:
    """Return the figures of a case.

    Args:
        case: one that `cases` yields.
        steps: optimizer steps of an ``updates`` case; a model always trains for 30.
    """
    with rounding(str(case["rounding"])):
        if case["experiment"] != "updates":
            loss = small_models_loss.train(str(case["experiment"]), "O2", int(str(case["seed"])))
            return {"loss": f"{loss:.6f}"}
        lr = float(str(case["lr"]))
        moved = updates.displacement(updates.STORES[str(case["store"])], lr, steps)
    figures = updates.compare(moved, updates.displacement(updates.Store(), lr, steps))
    return {name: f"{figures[name]:.5g}" for name in ("cosine", "norm_ratio")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=updates.STEPS)
    add_csv(parser, "low_discrepancy")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    torch.set_num_threads(1)
    about = {
        "torch": torch.__version__,
        "commit": commit(),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "command": "python -m benchmarks.evidence.low_discrepancy",
    }
    for case in cases(arguments.seeds, arguments.models):
        done = {tuple(str(row[name]) for name in KEY) for row in read_rows(arguments.csv)}
        if tuple(str(case[name]) for name in KEY) not in done:
            row = {**case, **measure(case, arguments.steps), **about}
            append_rows(arguments.csv, COLUMNS, [row])
            print(*row.values(), flush=True)
    print_differences(read_rows(arguments.csv))


def differences(rows: list[dict[str, str]]) -> dict[str, tuple[float, float, int]]:
    """Return each model's mean change of the loss by the sequence, its error and the seeds."""
    loss = {(r["experiment"], r["seed"], r["rounding"]): float(r["loss"] or 0) for r in rows}
    changes: dict[str, list[float]] = {}
    for (model, seed, name), value in loss.items():
        if name == SEQUENCE and value and (model, seed, RANDOM) in loss:
            changes.setdefault(model, []).append(value / loss[model, seed, RANDOM] - 1)
    return {
        model: (statistics.mean(x), statistics.stdev(x) / len(x) ** 0.5, len(x))
        for model, x in changes.items()
        if len(x) > 1
    }


def print_differences(rows: list[dict[str, str]]) -> None:
    """Print what `differences` returns."""
    for model, (mean, error, seeds) in differences(rows).items():
        print(f"{model:12} {mean:+.2%} +- {error:.2%} of {seeds} seeds")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
