"""Error of every recipe's casts and forward GEMM on easy and hard inputs, as CSV.

    python -m benchmarks.evidence.numerics        # runs/benchmarks/numerics.csv

Shapes: x (384, 512), w (320, 512), both float32; the GEMM's reference is float32.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.rows import add_csv, write_rows
from torch_fp8.ops.quantize import dequantize, quantize
from torch_fp8.ops.scaled_mm import scaled_matmul
from torch_fp8.quantization.recipe import RECIPES, make_recipe
from torch_fp8_tools.metrics import sqnr_db, worst_row_sqnr_db

COLUMNS = ("recipe", "input", "operand", "sqnr_db", "worst_row_db", "flushed")


def gaussian(rows: int, cols: int) -> Tensor:
    """Return standard normal values."""
    return torch.randn(rows, cols)


def row_spread(rows: int, cols: int) -> Tensor:
    """Return normal rows whose scale runs from 2^-8 to 2^8."""
    return torch.randn(rows, cols) * 2.0 ** torch.linspace(-8, 8, rows)[:, None]


def outlier(rows: int, cols: int) -> Tensor:
    """Return standard normal values with one element of 1000."""
    x = torch.randn(rows, cols)
    x[rows // 2, cols // 2] = 1000.0
    return x


INPUTS = {"gaussian": gaussian, "row_spread": row_spread, "outlier": outlier}


def measure(recipe_name: str, input_name: str) -> Iterator[dict[str, str | float]]:
    """Yield rows for the three casts and the forward GEMM of a recipe on one kind of input.

    Delayed scaling is measured with the scale of the tensor itself, as in its first step.
    """
    torch.manual_seed(0)
    recipe = make_recipe(recipe_name)
    x, w = INPUTS[input_name](384, 512), torch.randn(320, 512)
    for operand in ("input", "weight", "grad_output"):
        back = dequantize(quantize(x, getattr(recipe, operand)))
        yield _row(recipe_name, input_name, operand, x, back)
    y = scaled_matmul(quantize(x, recipe.input), quantize(w, recipe.weight), torch.float32)
    yield _row(recipe_name, input_name, "fprop", x @ w.t(), y)


def flushed(exact: Tensor, actual: Tensor) -> float:
    """Return the share of the non-zero elements that are zero once quantized."""
    nonzero = exact != 0
    return ((actual == 0) & nonzero).sum().item() / max(nonzero.sum().item(), 1)


def _row(
    recipe: str, input_name: str, operand: str, exact: Tensor, actual: Tensor
) -> dict[str, str | float]:
    return {
        "recipe": recipe,
        "input": input_name,
        "operand": operand,
        "sqnr_db": round(sqnr_db(exact, actual), 2),
        "worst_row_db": round(worst_row_sqnr_db(exact, actual), 2),
        "flushed": round(flushed(exact, actual), 5),
    }


def main() -> None:
    """Measure everything and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "numerics")
    path, rows = parser.parse_args().csv, []
    for recipe in RECIPES:
        for input_name in INPUTS:
            rows += measure(recipe, input_name)
    write_rows(path, COLUMNS, rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
