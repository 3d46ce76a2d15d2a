"""Loss with Adam's first moment on the grid of 4 bits, against that of 8 bits, seed by seed, as CSV.

    python -m benchmarks.evidence.four_bit_training small-models
    python -m benchmarks.evidence.four_bit_training pretraining

``small-models`` are those of `small_models_loss`, 30 steps at level O2, with learning rates of 0.3,
1 and 3 times its own; ``pretraining`` is that of `pretraining`, 3,000 steps. The grid is ``ratio
8`` of `four_bit_moments`: codes -7..7 of m / sqrt(v), v as it is stored, in groups of 8. Moments
lie on it and are kept in float32: not memory is measured here. Embeddings, the head, and matrices
whose rows are no multiple of 16 keep 8 bits.
"""

import argparse
import contextlib
import datetime
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.evidence import pretraining, small_models_loss
from benchmarks.evidence.recipes_loss import commit
from benchmarks.rows import add_csv, append_rows, read_rows, tell_kept
from torch_fp8 import convert_optimizer
from torch_fp8.kernels.arguments import StepScalars, WeightMatrix
from torch_fp8.ops import adamw
from torch_fp8.quantization.block_scaled import BlockScaled, decode, encode
from torch_fp8.quantization.formats import MOMENT2
from torch_fp8.quantization.linear_int8 import thresholds
from torch_fp8.quantization.split_float import pack, split
from torch_fp8.quantization.stochastic_rounding import element_index, random_words, second_words
from torch_fp8.tensor.split_weight import SplitWeight

GROUP, LARGEST, LEAST_SCALE, LARGEST_SCALE = 8, 7, 2.0**-7, 2 - 2.0**-5
RATES = (0.3, 1.0, 3.0)
BITS = ("8", "4")
COLUMNS = [
    *("experiment", "model", "lr_factor", "moment_bits", "seed", "loss"),
    *("torch", "commit", "date", "command"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=["small-models", "pretraining"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    add_csv(parser, "four_bit_training")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    torch.set_num_threads(1)
    experiment = arguments.experiment
    models, rates = list(small_models_loss.MODELS), arguments.rates
    if experiment == "pretraining":
        models, rates = ["llama, 0.5M"], [1.0]
    for seed, rate, model, bits in itertools.product(arguments.seeds, rates, models, BITS):
        key = (experiment, model, f"{rate:g}", bits, str(seed))
        if key in {tuple(row[c] for c in COLUMNS[:5]) for row in read_rows(arguments.csv)}:
            continue
        row = dict(zip(COLUMNS, key, strict=False)) | {"loss": f"{loss(*key):.6f}"}
        row |= {"torch": torch.__version__, "commit": commit()}
        row |= {"date": f"{datetime.date.today():%Y-%m-%d}"}
        row |= {"command": f"python -m benchmarks.evidence.four_bit_training {experiment}"}
        append_rows(arguments.csv, COLUMNS, [row])
    print_summary([row for row in read_rows(arguments.csv) if row["experiment"] == experiment])


def loss(experiment: str, model: str, rate: str, bits: str, seed: str) -> float:
    """Return the loss after training."""
    module = pretraining if experiment == "pretraining" else small_models_loss
    with four_bits(module) if bits == "4" else contextlib.nullcontext():
        if module is pretraining:
            return float(pretraining.pretrain("O2", int(seed), 3000)["final_eval_loss"])
        small_models_loss.LEARNING_RATE = 2e-3 * float(rate)
        return small_models_loss.train(model, "O2", int(seed))


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print the mean difference of 4 bits to 8, as shares of the loss, and its standard error."""
    for model, rate in dict.fromkeys((row["model"], row["lr_factor"]) for row in rows):
        losses = {
            (row["moment_bits"], row["seed"]): float(row["loss"])
            for row in rows
            if (row["model"], row["lr_factor"]) == (model, rate)
        }
        seeds = [seed for bits, seed in losses if bits == "4"]
        differences = [losses["4", seed] / losses["8", seed] - 1 for seed in seeds]
        if len(differences) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            print(f"{model:12} lr x {rate:4} {statistics.mean(differences):+.3%} +- {error:.3%}")


@contextlib.contextmanager
def four_bits(module: Any) -> Iterator[None]:
    """Have the optimizers that `module` converts store m on the grid of 4 bits, within."""
    moments: dict[int, Tensor] = {}
    steps: dict[int, int] = {}
    in_8_bits: set[int] = set()
    step_part, convert = adamw._step_part, module.convert_optimizer

    def step_with_4_bits(part: WeightMatrix, scalars: StepScalars, lr_multiplier: Any) -> None:
        place = part.exp_avg.qdata.data_ptr()
        if part.weight.shape[1] % 16 or part.weight.untyped_storage().data_ptr() in in_8_bits:
            step_part(part, scalars, lr_multiplier)
            return
        assert lr_multiplier is None
        steps[place] = steps.get(place, 0) + 1
        zeros = torch.zeros(part.weight.shape)
        moments[place] = _step(part, scalars, moments.get(place, zeros), steps[place])

    def convert_and_exclude(optimizer: Any, config: Any, *, model: nn.Module) -> Any:
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            in_8_bits.add(id(getattr(layer, "weight", None)))
        converted = convert_optimizer(optimizer, config, model=model)
        for p in model.parameters():
            if id(p) in in_8_bits:
                high = p.halves.high if isinstance(p, SplitWeight) else p
                in_8_bits.add(high.untyped_storage().data_ptr())
        return converted

    adamw._step_part, module.convert_optimizer = step_with_4_bits, convert_and_exclude
    try:
        yield
    finally:
        adamw._step_part, module.convert_optimizer = step_part, convert


def _step(part: WeightMatrix, scalars: StepScalars, m: Tensor, step: int) -> Tensor:
    """Step a part as `adamw` does, with m in float32; return m as it reads from 4 bits."""
    weight = adamw._joined(part)
    grad = adamw._gradient(part, weight, scalars)
    weight = weight * scalars.decay
    m = m + (grad - m) * scalars.beta1_complement
    v = adamw._second_moment(part, grad, scalars)
    root = v.double().sqrt().float() * scalars.inv_sqrt_correction + scalars.eps
    weight = weight - (m / root) * scalars.step_size
    rows, cols = weight.shape
    index = element_index(rows, cols, part.row, part.col, part.row_length, weight.device)
    words = random_words(index, scalars.keys)
    adamw._store(part.exp_avg_sq, encode(v, MOMENT2, (words >> 12) & 0xFFFFF))
    if part.residual_bits < 8:
        words = second_words(words, scalars.keys)
    high, residual = split(weight, part.residual_bits, words)
    part.weight.copy_(high)
    adamw._raise_amax(part)
    if residual is not None:
        assert part.residual is not None
        part.residual.copy_(pack(residual, part.residual_bits))
    stored = decode(BlockScaled(*part.exp_avg_sq), MOMENT2)
    return _on_grid(m, stored, thresholds(index, 0, step, 0))


def _on_grid(m: Tensor, v: Tensor, threshold: Tensor) -> Tensor:
    """Return m (R, K) as its 4-bit codes give it back, given v as it is stored."""
    root = v.double().sqrt().float()
    z = torch.where(root > 0, m / root, 0.0).view(len(m), -1, GROUP)
    mantissa, exponent = torch.frexp(z.abs().amax(-1, keepdim=True) / LARGEST)
    scale = torch.ldexp(torch.ceil(mantissa * 64) / 64, exponent)
    scale = scale.clamp(LEAST_SCALE, LARGEST_SCALE)
    codes = (z / scale + threshold.view(z.shape)).floor().clamp(-LARGEST, LARGEST)
    return (codes * scale).view(m.shape) * root


if __name__ == "__main__":
    main()
