"""8-bit formats of Adam's second moment, each rounded to nearest and stochastically, as CSV.

    python -m benchmarks.evidence.moments         # runs/benchmarks/moments.csv

Formats, in groups of 32 or 128 along a row:

* ``tapered``: the package's, four mantissa bits in the upper eight binades, three in those below.
* ``ue5m3``: three in all: E5M2's range with its unused sign as a third mantissa bit.
* ``ue4m4``: four in all, with half the range.
* ``e5m2``: with a power-of-two scale (FP8 states of arXiv 2409.12517, finer scaled).
* ``sqrt_e4m3``: E4M3 of sqrt(v); stochastic rounding chooses the upper neighbour with the
  probability that keeps v itself right in the mean.
* ``expanded_e4m3``: COAT's range expansion (arXiv 2410.19313): E4M3 of v^k, k >= 1 chosen so that
  max / min of the group's non-zero elements fills E4M3's range; rounded as above. k and the
  group's maximum are kept in float32 here, at no charge.
* ``fitted_e4m3``: the same, but k may be below 1, where the range is too wide for E4M3.

Scenarios, at beta2 = 0.999:

* ``up`` and ``down``: a quarter of each group's gradients changes its scale tenfold; sqrt(v) as a
  fraction of float32's 4 / (1 - beta2) steps later, for changed and for unchanged elements.
  ``_3nats``: where log v has a standard deviation of 3 within the group before that.
* ``rounded_once``: v = g^2, the log of whose scale has a standard deviation of 3, rounded once.

``zero`` is the fraction of elements stored as 0 although positive: with a live first moment each
makes its weight explode. The unsigned formats store the smallest positive code instead.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rows import add_csv, write_rows
from torch_fp8.quantization.block_scaled import decode, encode
from torch_fp8.quantization.formats import GROUP_SIZE, MOMENT1, MOMENT2, ByteFloat

COLUMNS = (
    "format",
    "group",
    "rounding",
    "scenario",
    "elements",
    "median",
    "p05",
    "p95",
    "zero",
    "within_15_percent",
)
BETA2 = 0.999
SETTLING, FOLLOWING = 1000, round(4 / (1 - BETA2))
BAND = 0.15
SCENARIOS = ("up", "down", "up_3nats", "down_3nats")
ROWS, COLS = 16, 256  # of each scenario
E5M2 = ByteFloat("e5m2", 2, 15, 0x7B, False)
UE5M3 = ByteFloat("ue5m3", 3, 15, 0xFF, False)
UE4M4 = ByteFloat("ue4m4", 4, 7, 0xFF, False)


class Grid(NamedTuple):
    """The neighbours of a positive number among a format's values: ``lower <= y <= upper``."""

    lower: Tensor
    upper: Tensor


def neighbours(y: Tensor, format: ByteFloat) -> Grid:
    """Return the grid of a format around 0 <= y <= format.max; lower is y where y is
    representable.
    """
    exponent = torch.frexp(y).exponent - 1
    bits = torch.full_like(y, format.mantissa_bits)
    for binade in finer_binades(format):
        bits += exponent >= binade
    spacing = torch.exp2(exponent.clamp(min=1 - format.bias).float() - bits)
    lower = (y / spacing).floor() * spacing
    return Grid(lower, torch.where(lower < y, lower + spacing, lower))


def finer_binades(format: ByteFloat) -> list[int]:
    """Return the exponents from which on a tapered format has one mantissa bit more, and again one
    more.
    """
    exponent, code, bits = -format.bias, 0, format.mantissa_bits
    found = []
    for start in format.finer_from:
        exponent += (start - code) >> bits
        found.append(exponent)
        code, bits = start, bits + 1
    return found


def choose(exact: Tensor, lower: Tensor, upper: Tensor, uniform: Tensor | None) -> Tensor:
    """Choose the upper neighbour with the probability that keeps `exact` in the mean."""
    threshold = 0.5 if uniform is None else uniform
    return (exact - lower) > threshold * (upper - lower)


def block_scaled(v: Tensor, format: ByteFloat, uniform: Tensor | None) -> Tensor:
    """Return v (N, group) as it reads after storage in `format` with a power-of-two scale."""
    scale = _scale(v, format)
    grid = neighbours(v / scale, format)
    up = choose(v / scale, *grid, uniform)
    return torch.where(up, grid.upper, grid.lower) * scale


def never_zero(v: Tensor, format: ByteFloat, uniform: Tensor | None) -> Tensor:
    """Return the same as `block_scaled`, but a positive v stays positive."""
    smallest = format.smallest * _scale(v, format)
    stored = block_scaled(v, format, uniform)
    return torch.where((stored == 0) & (v > 0), smallest, stored)


def tapered(v: Tensor, uniform: Tensor | None) -> Tensor:
    return never_zero(v, MOMENT2, uniform)


def ue5m3(v: Tensor, uniform: Tensor | None) -> Tensor:
    return never_zero(v, UE5M3, uniform)


def ue4m4(v: Tensor, uniform: Tensor | None) -> Tensor:
    return never_zero(v, UE4M4, uniform)


def e5m2(v: Tensor, uniform: Tensor | None) -> Tensor:
    return block_scaled(v, E5M2, uniform)


def sqrt_e4m3(v: Tensor, uniform: Tensor | None) -> Tensor:
    root = v.sqrt()
    scale = _scale(root, MOMENT1)
    grid = neighbours(root / scale, MOMENT1)
    if uniform is None:
        up = choose(root / scale, *grid, None)
    else:
        up = choose(v / scale.square(), grid.lower.square(), grid.upper.square(), uniform)
    return (torch.where(up, grid.upper, grid.lower) * scale).square()


def expanded_e4m3(v: Tensor, uniform: Tensor | None, smallest_k: float = 1.0) -> Tensor:
    positive = torch.where(v > 0, v, torch.inf)
    largest, smallest = v.amax(-1, keepdim=True), positive.amin(-1, keepdim=True)
    relative = torch.where(largest > 0, v / largest, 0.0)
    spread = (largest / smallest).log().clamp(min=1e-6)
    k = (math.log(MOMENT1.max / MOMENT1.smallest) / spread).clamp(min=smallest_k)
    expanded = (relative**k * MOMENT1.max).clamp(max=MOMENT1.max)
    grid = neighbours(expanded, MOMENT1)
    if uniform is None:
        up = choose(expanded, *grid, None)
    else:
        lower, upper = ((y / MOMENT1.max) ** (1 / k) for y in grid)
        up = choose(relative, lower, upper, uniform)
    return (torch.where(up, grid.upper, grid.lower) / MOMENT1.max) ** (1 / k) * largest


def fitted_e4m3(v: Tensor, uniform: Tensor | None) -> Tensor:
    return expanded_e4m3(v, uniform, smallest_k=0.0)


FORMATS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "tapered": tapered,
    "ue5m3": ue5m3,
    "ue4m4": ue4m4,
    "e5m2": e5m2,
    "sqrt_e4m3": sqrt_e4m3,
    "expanded_e4m3": expanded_e4m3,
    "fitted_e4m3": fitted_e4m3,
}
PRODUCT = ("tapered", GROUP_SIZE, "stochastic")


def stored(v: Tensor, format_name: str, group: int, rounding: str) -> Tensor:
    """Return v (R, K) as it reads after storage."""
    if (format_name, group) == PRODUCT[:2]:  # as the optimizer has it
        random = None
        if rounding == "stochastic":
            random = torch.randint(1 << 20, v.shape, dtype=torch.int32)
        return decode(encode(v, MOMENT2, random), MOMENT2)
    groups = v.view(-1, group)
    uniform = torch.rand(groups.shape) if rounding == "stochastic" else None
    return FORMATS[format_name](groups, uniform).view(v.shape)


def measure_following(
    format_name: str, group: int, rounding: str, scenarios: tuple[str, ...] = SCENARIOS
) -> Iterator[dict]:
    """Yield rows of the scenarios in which gradients change their scale."""
    torch.manual_seed(0)
    nats = torch.tensor([3.0 if s.endswith("_3nats") else 0.0 for s in scenarios])
    factor = torch.tensor([10.0 if s.startswith("up") else 0.1 for s in scenarios])
    shape = (len(scenarios), ROWS, COLS)
    scale = (nats.view(-1, 1, 1) / 2 * torch.randn(shape)).exp()
    changed = (torch.arange(COLS) % 4 == 0).expand(shape)
    after = torch.where(changed, scale * factor.view(-1, 1, 1), scale)
    exact = scale.square()
    v = stored(exact.view(-1, COLS), format_name, group, rounding).view(shape)
    for step in range(SETTLING + FOLLOWING):
        square = (torch.randn(shape) * (scale if step < SETTLING else after)).square()
        exact = exact * BETA2 + square * (1 - BETA2)
        v = v * BETA2 + square * (1 - BETA2)
        v = stored(v.view(-1, COLS), format_name, group, rounding).view(shape)
    for i, scenario in enumerate(scenarios):
        for elements, where in (("changed", changed[i]), ("unchanged", ~changed[i])):
            yield {
                "format": format_name,
                "group": group,
                "rounding": rounding,
                "scenario": scenario,
                "elements": elements,
                **_statistics(v[i][where], exact[i][where]),
            }


def measure_once(format_name: str, group: int, rounding: str) -> dict:
    """Return the row of rounding once where log v is widely spread."""
    torch.manual_seed(0)
    v = (torch.randn(1024, 512) * (1.5 * torch.randn(1024, 512)).exp()).square()
    return {
        "format": format_name,
        "group": group,
        "rounding": rounding,
        "scenario": "rounded_once",
        "elements": "all",
        **_statistics(stored(v, format_name, group, rounding), v),
    }


def _scale(v: Tensor, format: ByteFloat) -> Tensor:
    """Return the smallest power of two with which the group's largest element fits."""
    fraction, exponent = torch.frexp(v.amax(-1, keepdim=True) / format.max)
    return torch.exp2((exponent - (fraction == 0.5).to(torch.int32)).float())


def _statistics(v: Tensor, exact: Tensor) -> dict[str, float | bool]:
    ratio = (v / exact).sqrt()
    p05, median, p95 = ratio.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    return {
        "median": round(median, 4),
        "p05": round(p05, 4),
        "p95": round(p95, 4),
        "zero": round(float(((v == 0) & (exact > 0)).float().mean()), 6),
        "within_15_percent": abs(median - 1) <= BAND,
    }


def main() -> None:
    """Measure everything and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "moments")
    path, rows = parser.parse_args().csv, []
    for format_name in FORMATS:
        for group in (32, 128):
            for rounding in ("stochastic", "nearest"):
                variant = format_name, group, rounding
                for row in (*measure_following(*variant), *measure_once(*variant)):
                    rows.append(row)
                    print(*row.values(), flush=True)
    write_rows(path, COLUMNS, rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
