"""Error of gradients summed over micro-batches in 8 bits, against a sum in float32, as CSV.

    python benchmarks/accumulation.py    # writes benchmarks/results/accumulation.csv

The stored sum is decoded, the next gradient added, and the result encoded again, so every
micro-batch rounds the whole sum. Gradients are (64, 512); each sum is repeated with `SEEDS` streams
of random bits on the same gradients, which tells noise (it differs) from bias (it stays).

* ``error``: ``|sum - exact| / |exact|``, root mean square over the streams. Target at 64: 0.10.
* ``bias``: the part of it that the mean over all streams would keep: noise, known from how the
  streams differ, is subtracted. Known to 0.0015.
* ``projection``: the mean sum projected on the exact one, minus 1, columns weighing alike.
* ``kept_small``: that of the columns with the smaller gradients: 1 where small contributions
  survive, 0 where they are lost.

Rounding to nearest loses what is the same every time: 28 % of it after 64 micro-batches.
Independent stochastic bits are unbiased but miss the target by 7 %. Pairs of complementary bits
meet it, with nearest's noise, and leave a bias of 0.5 % (BF16: up to 3 %), of which 0.3 % shrinks
the sum: the second bits are not independent of the first outcome, and where a sum has moved to a
coarser spacing in between, that outcome changes what the second one rounds. Half a turn instead of
the complement has half of both effects.
"""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fp8.block_scaled import decode, encode
from torch_fp8.formats import GRADIENT, MOMENT1, ByteFloat
from torch_fp8.random_bits import element_index, random_words, stream_keys

RESULTS = Path(__file__).parent / "results" / "accumulation.csv"
COLUMNS = ("method", "input", "micro_batches", "error", "bias", "projection", "kept_small")
SHAPE = ROWS, COLS = 64, 512
SEEDS = 32
MICRO_BATCHES = (1, 8, 64)
TARGET = 0.10
"""Of ``error`` at 64 micro-batches."""


def independent(count: int) -> Tensor:
    """Standard normal."""
    return torch.randn(count, *SHAPE)


def coherent(count: int) -> Tensor:
    """The same gradient every time."""
    return torch.randn(SHAPE).expand(count, *SHAPE)


def drifting(count: int) -> Tensor:
    """A tenth of the gradient is the same every time, the rest independent."""
    return independent(count) + 0.1 * torch.randn(SHAPE)


def column_spread(count: int) -> Tensor:
    """Columns whose scale runs from 2^-4 to 2^4 within each group of 32."""
    return independent(count) * 2.0 ** torch.linspace(-4, 4, 32).repeat(COLS // 32)


def outlier(count: int) -> Tensor:
    """One element in each group of 32 is 100 times larger."""
    gradients = independent(count)
    gradients[..., 7::32] *= 100
    return gradients


INPUTS = {f.__name__: f for f in (independent, coherent, drifting, column_spread, outlier)}


def antithetic_bits(index: Tensor, seed: int, accumulated: int) -> Tensor:
    """Bits of the rounding number `accumulated`: a pair shares a word, its second complements it.

    What the first of a pair rounded up the second tends to round down. Of independent gradients
    that leaves the noise of rounding to nearest, half the variance of independent bits.
    """
    rank = 0
    bits = random_words(index, stream_keys(seed, rank, accumulated // 2)) & 0xFFFF
    if accumulated % 2:
        bits = bits ^ 0xFFFF
    return bits << 3 | 4


def half_turn_bits(index: Tensor, seed: int, accumulated: int) -> Tensor:
    """Bits of the rounding number `accumulated`: a pair shares a word, its second flips one bit."""
    bits = random_words(index, stream_keys(seed, accumulated // 2)) & 0xFFFF
    if accumulated % 2:
        bits = bits ^ 0x8000
    return bits << 3 | 4


def independent_bits(index: Tensor, seed: int, accumulated: int) -> Tensor:
    """Bits of the rounding number `accumulated`, a word for each."""
    return (random_words(index, stream_keys(seed, accumulated)) & 0xFFFF) << 3 | 4


class Method(NamedTuple):
    """A format of the sum and how it is rounded; without a format BF16 to nearest."""

    format: ByteFloat | None
    bits: Callable[[Tensor, int, int], Tensor] | None


METHODS = {
    "e3m4_antithetic": Method(GRADIENT, antithetic_bits),
    "e3m4_half_turn": Method(GRADIENT, half_turn_bits),
    "e3m4_stochastic": Method(GRADIENT, independent_bits),
    "e3m4_nearest": Method(GRADIENT, None),
    "e4m3_antithetic": Method(MOMENT1, lambda *which: antithetic_bits(*which) << 1),
    "e4m3_nearest": Method(MOMENT1, None),
    "bf16_nearest": Method(None, None),
}
PRODUCT = "e3m4_antithetic"


def accumulate(gradients: Tensor, method: Method, seed: int) -> Iterator[Tensor]:
    """The stored sum after each gradient, as float32."""
    index = element_index(ROWS, COLS, 0, 0, COLS, gradients.device)
    total = torch.zeros(SHAPE)
    for accumulated, gradient in enumerate(gradients):
        total = total + gradient
        if method.format is None:
            total = total.bfloat16().float()
        else:
            bits = method.bits(index, seed, accumulated) if method.bits else None
            total = decode(encode(total, method.format, bits), method.format)
        yield total


def measure(method_name: str, input_name: str, seeds: int = SEEDS) -> Iterator[dict]:
    """One row for each number of micro-batches."""
    torch.manual_seed(0)
    gradients = INPUTS[input_name](max(MICRO_BATCHES)).bfloat16().float()
    exact = gradients.double().cumsum(0).float()
    size = gradients.square().mean((0, 1))
    small = size <= size.median()
    method = METHODS[method_name]
    mean = {count: torch.zeros(SHAPE) for count in MICRO_BATCHES}
    square = dict.fromkeys(MICRO_BATCHES, 0.0)
    for seed in range(seeds):
        for count, total in enumerate(accumulate(gradients, method, seed), 1):
            if count in MICRO_BATCHES:
                error = total - exact[count - 1]
                mean[count] += error / seeds
                square[count] += float(error.square().sum()) / seeds
    for count in MICRO_BATCHES:
        target = exact[count - 1]
        kept = (mean[count] * target).sum(0) / target.square().sum(0)
        norm = float(target.norm())
        noise = square[count] / seeds
        excess = max(float(mean[count].square().sum()) - noise, 0.0) / (1 - 1 / seeds)
        yield {
            "method": method_name,
            "input": input_name,
            "micro_batches": count,
            "error": round(square[count] ** 0.5 / norm, 4),
            "bias": round(excess**0.5 / norm, 4),
            "projection": round(float(kept.mean()), 5),
            "kept_small": round(1 + float(kept[small].mean()), 4),
        }


def main() -> None:
    """Measure everything and write the CSV."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for method in METHODS:
            for input_name in INPUTS:
                for row in measure(method, input_name):
                    writer.writerow(row)
                    print(*row.values(), flush=True)
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
