"""Displacement of weights after 2,000 small updates, compared with FP32.

    python -m benchmarks.evidence.updates         # runs/benchmarks/updates.csv

AdamW on the regression ``|x (w - w*)|^2 / 2B`` with w, w* (256, 256), w ~ 0.02 N(0, 1),
w* - w ~ 0.02 N(0, 1), batches x (32, 256) ~ N(0, 1), labels with noise of 0.2 N(0, 1); every store
gets the gradient of the weights it computes with, from the same batches. At lr 1e-6 (RLHF) a step
moves a weight by at most 5e-5 of itself, a hundredth of BF16's spacing, and 2,000 steps by 4.4e-4.

* ``cosine``, ``norm_ratio``, ``projection``: of the displacement of the merged weights from their
  start, against the FP32 run's; ``projection`` is their product.

Stores: ``residual_k``: BF16 and k residual bits, with float32 moments; ``o2_k``: with 8-bit moments
and a BF16 gradient; ``o3_k``: with an 8-bit gradient, too; ``bf16_nearest`` and ``fp16_nearest``:
16-bit master weights without a residual, and float32 moments, as other systems have them.
``e4m3_m_only``, ``tapered_v_only``, ``tapered_gradient_only``: one part of a level by itself, on
float32 weights.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measurement import environment
from benchmarks.rows import add_csv, write_rows
from torch_fp8.kernels.arguments import GradientParts, StepScalars, WeightMatrix
from torch_fp8.ops.adamw import adamw_step_reference
from torch_fp8.quantization.block_scaled import BlockScaled, decode, encode, num_groups
from torch_fp8.quantization.formats import GRADIENT, MOMENT1, MOMENT2, ByteFloat
from torch_fp8.quantization.split_float import join, split
from torch_fp8.quantization.stochastic_rounding import (
    element_index,
    random_words,
    second_words,
    stream_keys,
    stream_state,
)

COLUMNS = (
    "store",
    "lr",
    "steps",
    "cosine",
    "norm_ratio",
    "projection",
    "mean_displacement",
    "torch",
    "commit",
    "date",
    "command",
)
SIZE = 256
BATCH = 32
LABEL_NOISE = 0.2
STEPS = 2000
RATES = (1e-6, 1e-5)
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
SEED = 0


class Store(NamedTuple):
    """The formats in which an optimizer's tensors are stored between steps.

    Attributes:
        weight: dtype of the master weight; of bfloat16 with `residual_bits` the upper part.
        residual_bits: bits below `weight`, or None to round `weight` to nearest.
        moment1, moment2, gradient: formats, or None for float32.
    """

    weight: torch.dtype = torch.float32
    residual_bits: int | None = None
    moment1: ByteFloat | None = None
    moment2: ByteFloat | None = None
    gradient: ByteFloat | torch.dtype | None = None


def level(residual_bits: int, gradient: ByteFloat | torch.dtype) -> Store:
    return Store(torch.bfloat16, residual_bits, MOMENT1, MOMENT2, gradient)


STORES = {
    "residual_8": Store(torch.bfloat16, 8),
    "residual_4": Store(torch.bfloat16, 4),
    "residual_0": Store(torch.bfloat16, 0),
    "o2_8": level(8, torch.bfloat16),
    "o2_4": level(4, torch.bfloat16),
    "o2_0": level(0, torch.bfloat16),
    "o3_8": level(8, GRADIENT),
    "o3_4": level(4, GRADIENT),
    "o3_0": level(0, GRADIENT),
    "bf16_nearest": Store(torch.bfloat16),
    "fp16_nearest": Store(torch.float16),
    "e4m3_m_only": Store(moment1=MOMENT1),
    "tapered_v_only": Store(moment2=MOMENT2),
    "tapered_gradient_only": Store(gradient=GRADIENT),
}
TARGETS = {"residual_8": (0.999, 0.01), "o2_8": (0.99, 0.05), "o3_8": (0.99, 0.05)}
"""The smallest cosine, and the largest difference of the norm ratio from 1."""


class Regression:
    """A problem of regression: the start, the goal, and the gradient of one batch after the
    other.
    """

    def __init__(self, rows: int = SIZE, cols: int = SIZE) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self.start = 0.02 * self._normal(rows, cols)
        self._goal = self.start + 0.02 * self._normal(rows, cols)

    def gradient(self, weight: Tensor) -> Tensor:
        x = self._normal(BATCH, weight.shape[1])
        noise = LABEL_NOISE * self._normal(BATCH, weight.shape[0])
        difference = x @ (weight - self._goal).t() + noise
        return difference.t() @ x / BATCH

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


def displacement(store: Store, lr: float, steps: int, size: int = SIZE) -> Tensor:
    """Return the displacement of merged weights after `steps`, with the package's step for a
    level that it has; its residuals had 4 bits until 0.1.0.
    """
    problem = Regression(size, size)
    is_level = store.moment1 and store.moment2 and store.residual_bits != 4
    run = LevelRun if is_level else PlainRun
    training = run(store, problem.start)
    start = training.merged()
    for step in range(1, steps + 1):
        training.step(problem.gradient(training.computing()), lr, step)
    return training.merged() - start


class LevelRun:
    """Training with the package's step."""

    def __init__(self, store: Store, start: Tensor) -> None:
        rows, cols = start.shape
        bits = store.residual_bits
        weight, residual = split(start, bits)
        states = [
            BlockScaled(
                torch.zeros(rows, cols, dtype=torch.uint8),
                torch.full((rows, num_groups(cols)), 127, dtype=torch.uint8),
            )
            for _ in range(2)
        ]
        stored = None if residual is None else residual.to(torch.int8)
        self._gradient_format = store.gradient
        self.matrix = WeightMatrix(weight, stored, weight, *states, 0, 0, cols)

    def merged(self) -> Tensor:
        weight, residual, *_ = self.matrix
        return join(weight, residual, 0 if residual is None else 8)

    def computing(self) -> Tensor:
        return self.matrix.weight.float()

    def step(self, gradient: Tensor, lr: float, step: int) -> None:
        if isinstance(self._gradient_format, ByteFloat):
            codes = encode_gradient(gradient, step)
            gradient = GradientParts(*codes, torch.ones(()))
        else:
            gradient = gradient.to(self._gradient_format)
        adamw_step_reference(self.matrix._replace(grad=gradient), scalars_of(lr, step))


class PlainRun:
    """Training with a separate step, which rounds only the tensors that the store rounds."""

    def __init__(self, store: Store, start: Tensor) -> None:
        self._store = store
        self._merged = self._rounded_weight(start, None)
        self._exp_avg, self._exp_avg_sq = torch.zeros_like(start), torch.zeros_like(start)

    def merged(self) -> Tensor:
        return self._merged

    def computing(self) -> Tensor:
        if self._store.residual_bits is None:
            return self._merged
        return split(self._merged, self._store.residual_bits)[0].float()

    def step(self, gradient: Tensor, lr: float, step: int) -> None:
        store, scalars = self._store, scalars_of(lr, step)
        if isinstance(store.gradient, ByteFloat):
            gradient = decode(encode_gradient(gradient, step), store.gradient)
        elif store.gradient is not None:
            gradient = gradient.to(store.gradient).float()
        weight = self._merged * scalars.decay
        m = self._exp_avg + (gradient - self._exp_avg) * scalars.beta1_complement
        v = self._exp_avg_sq * scalars.beta2 + gradient * gradient * scalars.beta2_complement
        # As in the package: torch's float32 root is wrong in the last bit here and there.
        denominator = v.double().sqrt().float() * scalars.inv_sqrt_correction + scalars.eps
        weight = weight - m / denominator * scalars.step_size
        keys = stream_keys(0, after=scalars.stream)
        words = random_words(_index(weight), keys)
        self._exp_avg = _rounded(m, store.moment1, ((words >> 8) & 0xFF) << 12 | 1 << 11)
        self._exp_avg_sq = _rounded(v, store.moment2, (words >> 12) & 0xFFFFF)
        few_bits = store.residual_bits is not None and store.residual_bits < 8
        words = second_words(words, keys) if few_bits else words
        self._merged = self._rounded_weight(weight, words)

    def _rounded_weight(self, weight: Tensor, words: Tensor | None) -> Tensor:
        bits = self._store.residual_bits
        if bits is None:
            return weight.to(self._store.weight).float()
        return join(*split(weight, bits, words), bits)


def encode_gradient(gradient: Tensor, step: int) -> BlockScaled:
    """Round the gradient of one micro-batch, BF16 before that, as the level stores it."""
    words = random_words(_index(gradient), stream_keys(SEED, step, 0, 0))
    return encode(gradient.bfloat16().float(), GRADIENT, (words & 0xFFFF) << 4 | 8)


def scalars_of(lr: float, step: int) -> StepScalars:
    beta1, beta2 = BETAS
    return StepScalars(
        beta1_complement=1 - beta1,
        beta2=beta2,
        beta2_complement=1 - beta2,
        step_size=lr / (1 - beta1**step),
        inv_sqrt_correction=(1 - beta2**step) ** -0.5,
        eps=EPS,
        decay=1 - lr * WEIGHT_DECAY,
        weight_decay=0.0,
        maximize=False,
        stream=stream_state(SEED, step),
    )


def compare(moved: Tensor, expected: Tensor) -> dict[str, float]:
    """Return cosine, norm ratio and projection of two displacements, and the first one's mean
    size.
    """
    moved, expected = moved.double().flatten(), expected.double().flatten()
    ratio = float(moved.norm() / expected.norm())
    cosine = float(moved @ expected / (moved.norm() * expected.norm())) if ratio else 0.0
    return {
        "cosine": cosine,
        "norm_ratio": ratio,
        "projection": cosine * ratio,
        "mean_displacement": float(moved.abs().mean()),
    }


def measure(names: list[str], lr: float, steps: int, size: int = SIZE) -> Iterator[dict]:
    """Yield a row for each store."""
    expected = displacement(Store(), lr, steps, size)
    for name in names:
        result = compare(displacement(STORES[name], lr, steps, size), expected)
        yield {
            "store": name,
            "lr": lr,
            "steps": steps,
            **{column: f"{value:.5g}" for column, value in result.items()},
        }


def _index(x: Tensor) -> Tensor:
    rows, cols = x.shape
    return element_index(rows, cols, 0, 0, cols, x.device)


def _rounded(x: Tensor, format: ByteFloat | None, random: Tensor) -> Tensor:
    return x if format is None else decode(encode(x, format, random), format)


def main() -> None:
    """Measure everything and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    add_csv(parser, "updates")
    arguments = parser.parse_args()
    about = environment(torch.device("cpu"))
    rows = []
    for lr in arguments.rates:
        for row in measure(arguments.stores, lr, arguments.steps):
            rows.append({**row, **about})
            print(*row.values(), flush=True)
    write_rows(arguments.csv, COLUMNS, rows)
    print(f"wrote {arguments.csv}")


if __name__ == "__main__":
    main()
