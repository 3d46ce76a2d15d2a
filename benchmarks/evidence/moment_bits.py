"""Whether the first moment survives 4 bits, as codes of m / sqrt(v): experiments, as CSV.

    python -m benchmarks.evidence.moment_bits simulation     # runs/benchmarks/moment_bits.csv
    python -m benchmarks.evidence.moment_bits small-models   # ten paired seeds, three rates
    python -m benchmarks.evidence.moment_bits pretraining    # 0.5 million parameters, 3,000 steps

The scheme: v has 8 bits as in every other level. In groups of 16 along the last dimension,
``code = floor(m / (sqrt(v) * scale) + threshold)`` in -7..7, with v as it was stored in this step,
and a scale of three mantissa bits, the least that holds the group. Thresholds follow a
low-discrepancy sequence, ``frac(hash(index) + step * golden ratio)``. The update takes m before it
is rounded. 4 + 8/16 bits an element.

``simulation``: one matrix (32, 256), 600 steps; gradients are noise with a signal of a tenth of it,
2 % outliers of 5x, slow swings; their scales are lognormal by row (1.0), column (0.7) and element
(``spread``); a share ``zeros`` of them is zero. ``error``: mean relative L2 distance of an update
from that of float32 states; ``cosine``, ``norm``: of the whole displacement.

In training the moments lie on the grid of 4 bits and are kept in float32: memory is not what is
measured. Embeddings and the head keep 8 bits, as do matrices whose rows are no multiple of 16.
"""

import argparse
import contextlib
import datetime
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
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
from torch_fp8.quantization.formats import MOMENT1, MOMENT2
from torch_fp8.quantization.split_float import pack, split
from torch_fp8.quantization.stochastic_rounding import element_index, random_words, second_words
from torch_fp8.tensor.split_weight import SplitWeight

GROUP, LARGEST = 16, 7
GOLDEN = 2654435769  # the golden ratio's fraction, of 2^32
COLUMNS = [
    *("experiment", "case", "scheme", "seed", "error", "cosine", "norm", "loss"),
    *("torch", "commit", "date", "command"),
]
RATES = (0.3, 1.0, 3.0)
SPREADS, ZEROS, BETA2 = (0.5, 1.5, 3.0), (0.0, 0.9, 0.99), (0.999, 0.95)


# ---- schemes: what is stored of m, given v as it was stored --------------------------------------


def thresholds(index: Tensor, step: int) -> Tensor:
    """Return the low-discrepancy thresholds of elements in one step, float32 in [0, 1).

    Args:
        index: int64, the elements' places in the whole weight.
        step: the number of the step; every 4,096 the sequences are perturbed.
    """
    x = ((index + (step // 4096) * 0x632BE5AB) * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) + step * GOLDEN) & 0xFFFFFFFF
    return ((x >> 8).double() / 2**24).float()


def rounded_up(x: Tensor) -> Tensor:
    """Round positive x up to three mantissa bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ceil(mantissa * 16) / 16, exponent)


def ratio(m: Tensor, v: Tensor, threshold: Tensor, group: int = GROUP) -> Tensor:
    """Return m (R, K) as 4-bit codes of m / sqrt(v) give it back; K is a multiple of `group`."""
    root = v.double().sqrt().float()
    z = torch.where(root > 0, m / root, 0.0).view(len(m), -1, group)
    scale = rounded_up(z.abs().amax(-1, keepdim=True) / LARGEST)
    t = torch.where(scale > 0, z / scale, 0.0) + threshold.view(z.shape)
    return (t.floor().clamp(-LARGEST, LARGEST) * scale).view(m.shape) * root


def in_8_bits(m: Tensor, v: Tensor, generator: torch.Generator, step: int) -> Tensor:
    """Return E4M3 in groups of 32, rounded at random: what the package has."""
    words = torch.randint(2**20, m.shape, generator=generator, dtype=torch.int32)
    return decode(encode(m, MOMENT1, words), MOMENT1)


def ratio_of(group: int, rounding: str) -> Callable[..., Tensor]:
    """Return `ratio` with groups of `group`, rounded as said."""

    def stored(m: Tensor, v: Tensor, generator: torch.Generator, step: int) -> Tensor:
        if rounding == "sequence":
            threshold = thresholds(torch.arange(m.numel()).view(m.shape), step)
        elif rounding == "random":
            threshold = torch.rand(m.shape, generator=generator)
        else:
            threshold = torch.full_like(m, 0.5)
        return ratio(m, v, threshold, group)

    return stored


def dynamic_exponent(m: Tensor, v: Tensor, generator: torch.Generator, step: int) -> Tensor:
    """Return torchao's and Li et al.'s m (arXiv 2309.01507): signed dynamic exponent, groups of
    128, to nearest.
    """
    positive = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
    grid = torch.tensor([*(-x for x in positive[::-1]), 0.0, *positive, 1.0])
    groups = m.view(-1, 128)
    scale = groups.abs().amax(-1, keepdim=True)
    t = torch.where(scale > 0, groups / scale, 0.0)
    bounds = (grid[1:] + grid[:-1]) / 2
    return (grid[torch.bucketize(t, bounds)] * scale).view(m.shape)


def linear_4_bits(m: Tensor, v: Tensor, generator: torch.Generator, step: int) -> Tensor:
    """Return int4 of m itself in groups of 32, rounded at random."""
    groups = m.view(-1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST
    t = torch.where(scale > 0, groups / scale, 0.0) + torch.rand(groups.shape, generator=generator)
    return (t.floor().clamp(-LARGEST, LARGEST) * scale).view(m.shape)


SCHEMES: dict[str, Callable[..., Tensor]] = {
    "8 bits": in_8_bits,
    "ratio, 16, sequence": ratio_of(16, "sequence"),
    "ratio, 32, sequence": ratio_of(32, "sequence"),
    "ratio, 16, random": ratio_of(16, "random"),
    "ratio, 16, nearest": ratio_of(16, "nearest"),
    "dynamic exponent, 128, nearest": dynamic_exponent,
    "linear, 32, random": linear_4_bits,
}


# ---- the simulation ------------------------------------------------------------------------------


def simulate(
    scheme: Callable[..., Tensor],
    seed: int,
    spread: float,
    zeros: float,
    beta2: float,
    steps: int = 600,
) -> tuple[float, float, float]:
    """Return error, cosine and norm of `scheme`, as the module describes them."""
    rows, cols, beta1 = 32, 256, 0.9
    data, rounding = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(77 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=data)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=data)

    scale = 1e-3 * torch.exp(normal(rows, 1) + 0.7 * normal(1, cols) + spread * normal(rows, cols))
    signal = 0.2 * normal(rows, cols).sign() * uniform(rows, cols)
    phase = 2 * math.pi * uniform(rows, 1)
    exact, stored = [torch.zeros(3, rows, cols) for _ in range(2)]  # m, v, displacement
    errors = []
    for step in range(1, steps + 1):
        noise = normal(rows, cols)
        noise = torch.where(uniform(rows, cols) < 0.02, 5 * noise, noise)
        grad = scale * (1 + 0.5 * torch.sin(phase + step / 60)) * (signal + noise)
        if zeros:
            grad = torch.where(uniform(rows, cols) < zeros, 0.0, grad)
        updates = []
        for m, v, displacement in (exact, stored):
            m += (grad - m) * (1 - beta1)
            v.mul_(beta2).add_(grad * grad, alpha=1 - beta2)
            root = (v / (1 - beta2**step)).sqrt() + 1e-8
            updates.append(m / (1 - beta1**step) / root)
            displacement += updates[-1]
        words = torch.randint(2**20, (rows, cols), generator=rounding, dtype=torch.int32)
        stored[1] = decode(encode(stored[1], MOMENT2, words), MOMENT2)
        stored[0] = scheme(stored[0], stored[1], rounding, step)
        if step > 50:
            errors.append(float((updates[1] - updates[0]).norm() / updates[0].norm()))
    one, other = exact[2], stored[2]
    cosine = float((one * other).sum() / one.norm() / other.norm())
    return statistics.mean(errors), cosine, float(other.norm() / one.norm())


# ---- training ------------------------------------------------------------------------------------


@contextlib.contextmanager
def ratio_moments() -> Iterator[Callable[[nn.Module], None]]:
    """Have large matrices keep m as `ratio` gives it back, within.

    Yields:
        A function that has the embeddings and the head of a model keep their 8 bits.
    """
    moments: dict[int, Tensor] = {}
    steps: dict[int, int] = {}
    excluded: set[int] = set()
    original = adamw._step_part

    def exclude(model: nn.Module) -> None:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            weight = getattr(module, "weight", None)
            if weight is not None:
                high = weight.halves.high if isinstance(weight, SplitWeight) else weight
                excluded.add(high.untyped_storage().data_ptr())

    def step_part(part: WeightMatrix, scalars: StepScalars, lr_multiplier: Any) -> None:
        place = part.exp_avg.qdata.data_ptr()
        if part.weight.shape[1] % GROUP or part.weight.untyped_storage().data_ptr() in excluded:
            original(part, scalars, lr_multiplier)
            return
        assert lr_multiplier is None
        steps[place] = steps.get(place, 0) + 1
        weight = adamw._joined(part)
        grad = adamw._gradient(part, weight, scalars)
        weight = weight * scalars.decay
        m = moments.get(place, torch.zeros(()))
        m = m + (grad - m) * scalars.beta1_complement
        v = adamw._second_moment(part, grad, scalars)
        root = v.double().sqrt().float() * scalars.inv_sqrt_correction + scalars.eps
        weight = weight - (m / root) * scalars.step_size
        rows, cols = weight.shape
        index = element_index(rows, cols, part.row, part.col, part.row_length, weight.device)
        words = random_words(index, scalars.keys)
        adamw._store(part.exp_avg_sq, encode(v, MOMENT2, (words >> 12) & 0xFFFFF))
        threshold = thresholds(index.long(), steps[place])
        moments[place] = ratio(m, decode(BlockScaled(*part.exp_avg_sq), MOMENT2), threshold)
        if part.residual_bits < 8:
            words = second_words(words, scalars.keys)
        high, residual = split(weight, part.residual_bits, words)
        part.weight.copy_(high)
        adamw._raise_amax(part)
        if residual is not None:
            part.residual.copy_(pack(residual, part.residual_bits))

    adamw._step_part = step_part
    try:
        yield exclude
    finally:
        adamw._step_part = original


@contextlib.contextmanager
def of_scheme(scheme: str, module: Any) -> Iterator[None]:
    """Have `module.convert_optimizer` make optimizers that keep m by `scheme`, within."""
    if scheme == "8 bits":
        yield
        return
    with ratio_moments() as exclude:

        def convert(optimizer: Any, config: Any, *, model: nn.Module) -> Any:
            converted = convert_optimizer(optimizer, config, model=model)
            exclude(model)
            return converted

        module.convert_optimizer = convert
        try:
            yield
        finally:
            module.convert_optimizer = convert_optimizer


def small_model_loss(case: str, scheme: str, seed: int) -> float:
    """Return the loss of ``MODEL, lr x RATE`` at O2 after 30 steps."""
    model, _, rate = case.partition(", lr x ")
    small_models_loss.LEARNING_RATE = 2e-3 * float(rate)
    with of_scheme(scheme, small_models_loss):
        return small_models_loss.train(model, "O2", seed)


def pretraining_loss(case: str, scheme: str, seed: int) -> float:
    """Return the loss on held-out files after pretraining at O2."""
    with of_scheme(scheme, pretraining):
        return float(pretraining.pretrain("O2", seed, 3000)["final_eval_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=["simulation", "small-models", "pretraining"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    add_csv(parser, "moment_bits")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    torch.set_num_threads(1)
    for seed, case, scheme in itertools.product(
        arguments.seeds, *cases_and_schemes(arguments.experiment)
    ):
        known = {tuple(row[c] for c in COLUMNS[:4]) for row in read_rows(arguments.csv)}
        key = (arguments.experiment, case, scheme, str(seed))
        if key in known:
            continue
        row = dict(zip(COLUMNS, key, strict=False)) | measured(*key[:3], seed)
        row |= {"torch": torch.__version__, "commit": commit()}
        row |= {"date": f"{datetime.date.today():%Y-%m-%d}"}
        row |= {"command": f"python -m benchmarks.evidence.moment_bits {arguments.experiment}"}
        append_rows(arguments.csv, COLUMNS, [row])
    print_summary(read_rows(arguments.csv), arguments.experiment)


def cases_and_schemes(experiment: str) -> tuple[list[str], list[str]]:
    """Return the cases of an experiment, and the schemes that it compares."""
    both = ["8 bits", "ratio, 16, sequence"]
    if experiment == "pretraining":
        return ["llama, 0.5M"], both
    if experiment == "small-models":
        named = itertools.product(small_models_loss.MODELS, RATES)
        return [f"{model}, lr x {rate:g}" for model, rate in named], both
    named = itertools.product(SPREADS, ZEROS, BETA2)
    return [f"spread {s:g}, zeros {z:g}, beta2 {b:g}" for s, z, b in named], list(SCHEMES)


def measured(experiment: str, case: str, scheme: str, seed: int) -> dict[str, str]:
    """Run one experiment and return its columns."""
    if experiment == "simulation":
        numbers = [float(part.rpartition(" ")[2]) for part in case.split(", ")]
        values = simulate(SCHEMES[scheme], seed, *numbers)
        names = ("error", "cosine", "norm")
        return {name: f"{value:.5f}" for name, value in zip(names, values, strict=True)}
    run = small_model_loss if experiment == "small-models" else pretraining_loss
    return {"loss": f"{run(case, scheme, seed):.6f}"}


def print_summary(rows: list[dict[str, Any]], experiment: str) -> None:
    """Print means over the seeds; of losses, the difference to 8 bits, seed by seed."""
    rows = [row for row in rows if row["experiment"] == experiment]
    for case, scheme in dict.fromkeys((row["case"], row["scheme"]) for row in rows):
        chosen = [row for row in rows if (row["case"], row["scheme"]) == (case, scheme)]
        if experiment == "simulation":
            means = [statistics.mean(float(r[c]) for r in chosen) for c in COLUMNS[4:7]]
            print(f"{case:36} {scheme:32}", *(f"{mean:.4f}" for mean in means))
        elif scheme != "8 bits":
            mean, error = paired(rows, case, scheme)
            print(f"{case:28} {scheme}: {mean:+.3%} +- {error:.3%} of the loss of 8 bits")


def paired(rows: list[dict[str, Any]], case: str, scheme: str) -> tuple[float, float]:
    """Return the mean of the relative differences of the loss to 8 bits, and its error."""
    losses = {(r["scheme"], r["seed"]): float(r["loss"]) for r in rows if r["case"] == case}
    seeds = [seed for name, seed in losses if name == scheme and ("8 bits", seed) in losses]
    found = [losses[scheme, seed] / losses["8 bits", seed] - 1 for seed in seeds]
    spread = statistics.stdev(found) if len(found) > 1 else math.nan
    return statistics.mean(found), spread / math.sqrt(len(found))


if __name__ == "__main__":
    main()
