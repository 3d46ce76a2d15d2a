"""What Smooth-SwiGLU's factors leave of the channels beside an aligned one, in dB.

    python -m benchmarks.evidence.smooth_factors    # runs/benchmarks/smooth_factors.csv

Of 2,048 Gaussian channels one is 200 times larger in gate and up. Activation and weight are cast to
E4M3 with a scale each: as they are, with factors that make all channels equal, and with their
square roots (`torch_fp8.ops.smooth`), for many tokens and for one: how exact is what the other
channels contribute to y.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows

CHANNELS, OUTPUTS, LARGER, MANY = 2048, 256, 200.0, 2048
WAYS = {"one scale": 0.0, "s = 1 / max": 1.0, "the root": 0.5}
"""How much of a channel's exponent its factor takes away."""
COLUMNS = ("tokens", "way", "sqnr_db", "torch", "commit", "date", "command")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "smooth_factors")
    path, about = parser.parse_args().csv, environment(torch.device("cpu"))
    rows = [
        {"tokens": tokens, "way": way, "sqnr_db": round(left(tokens, share), 1), **about}
        for tokens in (MANY, 1)
        for way, share in WAYS.items()
    ]
    write_rows(path, COLUMNS, rows)
    print_table(COLUMNS[:3], rows)


def left(tokens: int, share: float, seeds: int = 9) -> float:
    """Return the decibels that are left, the median over seeds."""
    return statistics.median(_left(tokens, share, seed) for seed in range(seeds))


def _left(tokens: int, share: float, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(tokens, CHANNELS, generator=generator) for _ in range(2))
    weight = torch.randn(OUTPUTS, CHANNELS, generator=generator)
    gate[:, 0] = LARGER * gate[:, 0].abs()
    up[:, 0] *= LARGER
    h = F.silu(gate) * up
    exponents = h.abs().amax(0).log2().floor()
    s = torch.exp2(-(share * exponents).floor())
    exact = h[:, 1:] @ weight[:, 1:].t()
    made = _e4m3(h * s)[:, 1:] @ _e4m3(weight / s)[:, 1:].t()
    return float(20 * (exact.norm() / (made - exact).norm()).log10())


def _e4m3(x: Tensor) -> Tensor:
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


if __name__ == "__main__":
    main()
