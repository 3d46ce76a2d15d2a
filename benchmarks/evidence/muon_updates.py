"""Muon's update from a momentum of 8 bits, against the one from float32, as CSV.

    python -m benchmarks.evidence.muon_updates    # runs/benchmarks/muon_updates.csv

A gradient (192, 384) is a signal that stays, and noise of the same spectrum that is new in each
step: singular values alike (``gaussian``), or falling as e^-5 and e^-9 from the first to the last.
After 100 steps of momentum 0.95 the update (Nesterov, five steps of Newton-Schulz in BF16) is
compared: ``cosine`` to the one from a float32 momentum of the same gradients.

``signal_to_noise`` is the ratio of both norms; gradients of mini-batches have 1 and less. Where it
is 10, gradients are nearly constant: what Newton-Schulz lifts there is in float32 a direction that
is thousands of times smaller than the largest, and no momentum of 8 bits has it.

Formats: ``int8``, what a converted Muon stores; ``int8 gathered``, where ranks send each other what
is to be orthogonalized, too, as under FSDP2; ``int8 random``, with random thresholds; ``e4m3``,
what Adam's first moment is stored in.

The others were tried for the cells where ``int8`` stays below 0.985, and none of them reaches it
in all: ``/32, byte scale`` has 32 elements a scale of one byte, at the same bytes; ``/16`` has 9 %
more bytes; ``columns`` groups along the other dimension; ``row x column`` has the smaller of both
maxima as scale; ``mu-law`` has codes that are finer near zero; ``subtracted`` takes thresholds off
again when it decodes; ``nearest`` has none.
"""

import argparse
import datetime
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measurement import environment
from benchmarks.rows import add_csv, write_rows
from torch_fp8.quantization.block_scaled import decode as decode_blocks
from torch_fp8.quantization.block_scaled import encode as encode_blocks
from torch_fp8.quantization.formats import MOMENT1
from torch_fp8.quantization.linear_int8 import decode, encode, thresholds
from torch_fp8.quantization.stochastic_rounding import (
    element_index,
    random_words,
    stream_keys,
)

ROWS, COLS, STEPS, MOMENTUM, SEEDS = 192, 384, 100, 0.95, 3
SPECTRA = {"gaussian": 0.0, "e^-5": 5.0, "e^-9": 9.0}
RATIOS = (0.3, 1.0, 10.0)
TARGET = 0.985
COEFFICIENTS = (3.4445, -4.775, 2.0315)
COLUMNS = (
    *("spectrum", "signal_to_noise", "format", "steps", "seeds", "cosine", "least"),
    *("torch", "commit", "date", "command"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "muon_updates")
    path = parser.parse_args().csv
    torch.set_num_threads(1)
    about = {k: v for k, v in environment(torch.device("cpu")).items() if k in COLUMNS}
    about["date"] = f"{datetime.date.today():%Y-%m-%d}"
    rows = []
    for spectrum in SPECTRA:
        for ratio in RATIOS:
            for name in FORMATS:
                cosines = [cosine(spectrum, ratio, name, seed) for seed in range(SEEDS)]
                row = {"spectrum": spectrum, "signal_to_noise": ratio, "format": name}
                row |= {"steps": STEPS, "seeds": SEEDS, "least": f"{min(cosines):.4f}"}
                row["cosine"] = f"{sum(cosines) / SEEDS:.4f}"
                rows.append({**row, **about})
                print(*list(row.values()), flush=True)
        write_rows(path, COLUMNS, rows)


def cosine(spectrum: str, ratio: float, name: str, seed: int, steps: int = STEPS) -> float:
    """Return the cosine of the last update to the one from a float32 momentum.

    Args:
        spectrum: name of SPECTRA.
        ratio: norm of the signal over that of the noise.
        name: name of FORMATS.
        seed: seed of signal and noise.
        steps: number of steps.
    """
    generator, store = torch.Generator().manual_seed(seed), FORMATS[name]
    signal = matrix(SPECTRA[spectrum], generator)
    exact, stored = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS)
    for step in range(steps):
        gradient = signal + matrix(SPECTRA[spectrum], generator) / ratio
        exact.lerp_(gradient, 1 - MOMENTUM)
        stored.lerp_(gradient, 1 - MOMENTUM)
        update, ours = (gradient.lerp(m, MOMENTUM) for m in (exact, stored))
        stored = store(stored, step)
    ours = decode(encode(ours)) if name == GATHERED else ours
    updates = orthogonal(update), orthogonal(ours)
    return torch.nn.functional.cosine_similarity(*(u.flatten() for u in updates), dim=0).item()


def matrix(rate: float, generator: torch.Generator) -> Tensor:
    """Return a matrix (ROWS, COLS) of norm 1, whose singular values fall by e^-rate."""
    x = torch.randn(ROWS, COLS, generator=generator)
    if rate:
        left, _ = torch.linalg.qr(torch.randn(ROWS, ROWS, generator=generator))
        right, _ = torch.linalg.qr(x.T)
        x = (left * torch.exp(-rate * torch.linspace(0, 1, ROWS))) @ right.T
    return x / x.norm()


def orthogonal(x: Tensor) -> Tensor:
    """Return what five steps of Newton-Schulz in BF16 make of x, as torch.optim.Muon does them."""
    a, b, c = COEFFICIENTS
    y = x.bfloat16()
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.float()


def _int8(x: Tensor, step: int) -> Tensor:
    index = element_index(ROWS, COLS, 0, 0, COLS, x.device)
    return decode(encode(x, thresholds(index, 0, step, 0)))


def _int8_random(x: Tensor, step: int) -> Tensor:
    words = random_words(element_index(ROWS, COLS, 0, 0, COLS, x.device), stream_keys(0, step, 0))
    return decode(encode(x, ((words >> 8) & 0xFFFFFF).float() * 2.0**-24))


def _e4m3(x: Tensor, step: int) -> Tensor:
    words = random_words(element_index(ROWS, COLS, 0, 0, COLS, x.device), stream_keys(0, step, 0))
    return decode_blocks(encode_blocks(x, MOMENT1, words), MOMENT1)


def _by_threshold(step: int) -> Tensor:
    return thresholds(element_index(ROWS, COLS, 0, 0, COLS, torch.device("cpu")), 0, step, 0)


def _grouped(x: Tensor, size: int) -> Tensor:
    """The largest magnitude of each group of a row, for its elements."""
    return x.view(len(x), -1, size).abs().amax(-1).repeat_interleave(size, 1)


def _linear(x: Tensor, largest: Tensor, threshold: Tensor | float, shift: Any = 0.0) -> Tensor:
    """Round to 255 levels up to `largest`; `shift` is taken off the codes."""
    scale = (largest / 127).clamp_min(1e-30)
    return (torch.floor(x / scale + threshold).clamp(-127, 127) - shift) * scale


def _byte_scale(x: Tensor, step: int) -> Tensor:
    rounded_up = torch.exp2(torch.ceil(torch.log2(_grouped(x, 32)) * 16) / 16)
    return _linear(x, rounded_up, _by_threshold(step))


def _sixteen(x: Tensor, step: int) -> Tensor:
    return _linear(x, _grouped(x, 16), _by_threshold(step))


def _columns(x: Tensor, step: int) -> Tensor:
    return _linear(x, _grouped(x.T.contiguous(), 64).T, _by_threshold(step))


def _row_column(x: Tensor, step: int) -> Tensor:
    magnitude = x.abs()
    largest = torch.minimum(magnitude.amax(1, keepdim=True), magnitude.amax(0, keepdim=True))
    return _linear(x, largest, _by_threshold(step))


def _nearest(x: Tensor, step: int) -> Tensor:
    return _linear(x, _grouped(x, 64), 0.5)


def _subtracted(x: Tensor, step: int) -> Tensor:
    threshold = _by_threshold(step)
    return _linear(x, _grouped(x, 64), threshold, threshold - 0.5)


def _mu_law(x: Tensor, step: int) -> Tensor:
    largest = _grouped(x, 64)
    share = x / largest
    code = torch.floor(127 * share.sign() * torch.log1p(MU * share.abs()) / math.log1p(MU))
    low, high = (
        y.sign() * torch.expm1(y.abs() * math.log1p(MU) / 127) / MU for y in (code, code + 1)
    )
    up = (share - low) / (high - low) + _by_threshold(step) >= 1
    return torch.where(up, high, low) * largest


MU = 2.0
GATHERED = "int8 gathered"
FORMATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "int8": _int8,
    GATHERED: _int8,
    "int8 random": _int8_random,
    "e4m3": _e4m3,
    "int8 /32, byte scale": _byte_scale,
    "int8 /16": _sixteen,
    "int8 columns": _columns,
    "int8 row x column": _row_column,
    "int8 mu-law": _mu_law,
    "int8 subtracted": _subtracted,
    "int8 nearest": _nearest,
}


if __name__ == "__main__":
    main()
