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
"""

import argparse
import datetime
from collections.abc import Callable

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


GATHERED = "int8 gathered"
FORMATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "int8": _int8,
    GATHERED: _int8,
    "int8 random": _int8_random,
    "e4m3": _e4m3,
}


if __name__ == "__main__":
    main()
