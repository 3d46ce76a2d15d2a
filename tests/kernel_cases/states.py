"""Matrices of an optimizer with 8-bit states, their comparison, and gradients to round."""

from typing import Any

import torch
from torch import Tensor

from tests.internals import (
    GRADIENT,
    MOMENT1,
    MOMENT2,
    BlockScaled,
    GradientParts,
    WeightMatrix,
    encode,
    split,
)


def optimizer_matrix(
    rows: int,
    cols: int,
    weight_dtype: torch.dtype,
    residual_bits: int,
    grad_dtype: torch.dtype,
    seed: int = 0,
    exponent: int = 0,
    place: tuple[int, int, int | None] = (0, 0, None),
) -> WeightMatrix:
    """Build a weight with residual, gradient and moments, of rows of different size, on the CPU.

    Args:
        grad_dtype: the dtype of the gradient; torch.uint8: `GradientParts`.
        exponent: gradients and moments are about 2 ** exponent.
        place: row, col and row_length of the `WeightMatrix`.
    """
    generator = torch.Generator().manual_seed(seed)

    def values(power: int = 1) -> Tensor:
        spread = 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)
        made: Tensor = torch.randn(rows, cols, generator=generator) * spread * 2.0**exponent
        return made**power

    weight, residual = torch.randn(rows, cols, generator=generator) / 8, None
    if weight_dtype == torch.bfloat16:
        random = torch.randint(0, 1 << 16, (rows, cols), generator=generator).int()
        weight, residual = split(weight, residual_bits, random)
        residual = None if residual is None else residual.to(torch.int8)
    grad: Any = values()
    if grad_dtype == torch.uint8:
        grad = GradientParts(*encode(grad, GRADIENT), torch.tensor(0.37))
    else:
        grad = grad.to(grad_dtype)
    exp_avg, exp_avg_sq = encode(values(), MOMENT1), encode(values(2), MOMENT2)
    row, col, row_length = place
    return WeightMatrix(weight, residual, grad, exp_avg, exp_avg_sq, row, col, row_length or cols)


def moved(matrix: WeightMatrix, device: str, copy: bool = True) -> WeightMatrix:
    def move(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(device, copy=copy)
        return type(x)(*map(move, x)) if isinstance(x, (BlockScaled, GradientParts)) else x

    return WeightMatrix(*map(move, matrix))


def matrix_differences(got: WeightMatrix, want: WeightMatrix) -> list[str]:
    """List what a step wrote differently; NaN equals NaN, and codes of groups that read NaN are
    free.
    """
    found: list[str] = []
    for name in ("weight", "residual", "amax"):
        a, b = getattr(got, name), getattr(want, name)
        if b is not None:
            same = (a.cpu() == b) | (a.cpu().isnan() & b.isnan())
            found += [f"{name}: {int((~same).sum())} differ"] * (not same.all())
    for name in ("exp_avg", "exp_avg_sq"):
        a, b = (BlockScaled(*(x.cpu() for x in getattr(m, name))) for m in (got, want))
        found += [f"{name} scale: {int((a.scale != b.scale).sum())} differ"] * (
            not torch.equal(a.scale, b.scale)
        )
        free = (b.scale == 255).repeat_interleave(32, 1)[:, : b.qdata.shape[1]]
        wrong = (a.qdata != b.qdata) & ~free
        found += [f"{name}: {int(wrong.sum())} differ"] * bool(wrong.any())
    return found
