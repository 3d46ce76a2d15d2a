"""Losses with Adam's first moment in 4 bits against those with 8, seed by seed, as CSV.

    python -m benchmarks.evidence.four_bit_training small-models
    python -m benchmarks.evidence.four_bit_training pretraining
    python -m benchmarks.evidence.four_bit_training larger
    python -m benchmarks.evidence.four_bit_training fine-tuning

* ``small-models``: those of `small_models_loss`, 30 steps at level O2, with learning rates of 0.3,
  1 and 3 times its own.
* ``pretraining``: that of `pretraining`, 3,000 steps; ``larger``: 500 steps of 25M parameters.
* ``fine-tuning``: a model that was pretrained in BF16 for 3,000 steps, for 500 steps at a learning
  rate of 1e-6, on files that it has not seen, with a 4-bit residual. ``cosine`` and ``norm`` are
  those of what its matrices move, to the same run with weights and moments in float32.

``moment_bits`` is 4 or 8, or ``exponent``: 8 bits, whose first moments are rounded after each step
to the published 4-bit format, a dynamic exponent map in groups of 128 (arXiv 2309.01507, torchao).
Rows with ``random`` are 4 bits as commit e202369 rounds them: by random thresholds, with a share
of each rounding error in the update.
A finished run becomes a row of the CSV at once, and a row that is there is not run again.
"""

import argparse
import copy
import datetime
import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from benchmarks.comparison import tiny_llama
from benchmarks.evidence import four_bit_moments, pretraining, small_models_loss, updates
from benchmarks.evidence.recipes_loss import commit
from benchmarks.rows import add_csv, append_rows, read_rows, tell_kept
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.optim.state import takes_ratio

RATES = (1.0, 0.3, 3.0)
SMALL, LARGER = "llama, 0.5M", "llama, 25M"
LARGER_SHAPE, LARGER_STEPS = (512, 8), 500
FINE_TUNING_RATE, FINE_TUNING_STEPS = 1e-6, 500
KEY = ("experiment", "model", "lr_factor", "seed", "moment_bits")
COLUMNS = (*KEY, "loss", "cosine", "norm", "torch", "commit", "date", "command")
SEEDS = {"small-models": 10, "pretraining": 10, "larger": 1, "fine-tuning": 3}
"""The experiments, with the number of their seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=SEEDS)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--bits", nargs="+", choices=["8", "4", "exponent"], default=["8", "4"])
    add_csv(parser, "four_bit_training")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    torch.set_num_threads(1)
    experiment = arguments.experiment
    seeds = arguments.seeds or range(SEEDS[experiment])
    for seed, (rate, model), bits in itertools.product(seeds, cases(experiment), arguments.bits):
        key = [experiment, model, f"{rate:g}", str(seed), bits]
        if key in ([row[name] for name in KEY] for row in read_rows(arguments.csv)):
            continue
        row = dict(zip(KEY, key, strict=True)) | measure(*key)
        row |= {"torch": torch.__version__, "commit": commit()}
        row |= {"date": f"{datetime.date.today():%Y-%m-%d}"}
        row |= {"command": f"python -m benchmarks.evidence.four_bit_training {experiment}"}
        append_rows(arguments.csv, COLUMNS, [row])
        print(*key, row["loss"], row.get("cosine", ""), row.get("norm", ""), flush=True)
    print_summary(read_rows(arguments.csv))


def cases(experiment: str) -> list[tuple[float, str]]:
    """Return the factors of the learning rate with the models of an experiment."""
    if experiment == "small-models":
        return list(itertools.product(RATES, small_models_loss.MODELS))
    return [(1.0, LARGER if experiment == "larger" else SMALL)]


def measure(experiment: str, model: str, rate: str, seed: str, bits: str) -> dict[str, str]:
    """Return the columns that a run measures."""
    config = FP8Config(moment_bits=4 if bits == "4" else 8)
    if experiment == "small-models":
        small_models_loss.LEARNING_RATE = 2e-3 * float(rate)
        small_models_loss.RUNS["four bits"] = config, config
        after_step = round_first_moments if bits == "exponent" else None
        loss = small_models_loss.train(model, "four bits", int(seed), after_step=after_step)
        return {"loss": f"{loss:.6f}"}
    if experiment == "fine-tuning":
        return fine_tuning(int(seed), config.moment_bits)
    steps, shape = pretraining.STEPS, pretraining.SHAPE
    if experiment == "larger":
        steps, shape = LARGER_STEPS, LARGER_SHAPE
    result = pretraining.pretrain(config, int(seed), steps, shape=shape)
    return {"loss": f"{result['final_eval_loss']:.6f}"}


@torch.no_grad()
def round_first_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Round the first moments of FP8 layers' weights to the published 4-bit format."""
    values = four_bit_moments.EXPONENTS
    for weight in fp8_weights(model):
        moment = optimizer.state[weight]["exp_avg"]
        groups = moment.reshape(-1, 128)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.bucketize(groups / scale, (values[1:] + values[:-1]) / 2)
        moment.copy_((values[codes] * scale).view(moment.shape))


def fp8_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of FP8 layers that can have a first moment in 4 bits."""
    for module in model.modules():
        for weight in module.fp8_weights if isinstance(module, RunsFP8) else ():
            if takes_ratio(weight):
                yield weight


@functools.cache
def pretrained() -> tuple[LlamaForCausalLM, Tensor, Tensor]:
    """Return a model pretrained in BF16, tokens to train it on, and tokens that show its loss."""
    tokens, held_out, vocab_size = pretraining.corpus()
    torch.manual_seed(0)
    model = tiny_llama.build(vocab_size, *pretraining.SHAPE, pad_token_id=0, eos_token_id=1)
    windows = pretraining.BATCH, pretraining.LENGTH
    tiny_llama.pretrain(model, tokens, pretraining.STEPS, *windows, bar=False)
    return model, *held_out.tensor_split(2)


@functools.cache
def fine_tuned(seed: int, config: FP8Config) -> tuple[Tensor, float]:
    """Return what the matrices of FP8 layers move, flat, and the loss at the end."""
    start, tokens, held_out = pretrained()
    model = copy.deepcopy(start)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=FINE_TUNING_RATE)
    convert_optimizer(optimizer, config, model=model)
    before = flat_weights(model)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(FINE_TUNING_STEPS):
        pretraining.loss_of(
            model, pretraining.windows(tokens, pretraining.BATCH, generator)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat_weights(model) - before, pretraining.evaluate(model.eval(), held_out)


def fine_tuning(seed: int, moment_bits: int) -> dict[str, str]:
    """Return the loss after fine-tuning, and how the matrices move next to float32 states."""
    config = FP8Config(moment_bits=moment_bits, residual_bits=4)
    moved, loss = fine_tuned(seed, config)
    expected, _ = fine_tuned(seed, FP8Config(opt_level="O1"))
    result = updates.compare(moved, expected)
    return {
        "loss": f"{loss:.6f}",
        "cosine": f"{result['cosine']:.5f}",
        "norm": f"{result['norm_ratio']:.5f}",
    }


def flat_weights(model: nn.Module) -> Tensor:
    """Return a copy of the weights of FP8 layers, as one vector in float32."""
    return torch.cat([weight.detach().float().flatten() for weight in fp8_weights(model)])


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print the mean difference to 8 bits, as a share of the loss, and its standard error."""
    for case, (mean, error, seeds) in differences(rows).items():
        print(f"{' '.join(case):45} {mean:+.3%} +- {error:.3%} ({seeds} seeds)")


def table(rows: list[dict[str, Any]], bits: str = "4") -> str:
    """Return the differences of the small models as docs/results.md has them."""
    by_case = differences(rows)
    lines = []
    for model in small_models_loss.MODELS:
        keys = [("small-models", model, f"{rate:g}", bits) for rate in sorted(RATES)]
        values = [by_case[key] for key in keys if key in by_case]
        shown = [f"{100 * mean:+.2f} ± {100 * error:.2f} %" for mean, error, _ in values]
        lines.append(f"| {model} | {' | '.join(shown)} |")
    return "\n".join(lines)


Case = tuple[str, str, str, str]
"""Experiment, model, factor of the learning rate, and bits."""


def differences(rows: list[dict[str, Any]]) -> dict[Case, tuple[float, float, int]]:
    """Return mean, standard error and number of seeds of each case's difference to 8 bits."""
    losses = {tuple(row[name] for name in KEY): float(row["loss"]) for row in rows}
    pairs: dict[Case, list[float]] = {}
    for (experiment, model, rate, seed, bits), value in losses.items():
        reference = losses.get((experiment, model, rate, seed, "8"))
        if bits != "8" and reference is not None:
            case = experiment, model, rate, bits
            pairs.setdefault(case, []).append(value / reference - 1)
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
