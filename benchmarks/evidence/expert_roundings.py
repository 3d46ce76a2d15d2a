"""Which casts bound the accuracy of a gated block of experts: ``expert_roundings.csv``.

    python -m benchmarks.evidence.expert_roundings    # runs/benchmarks/expert_roundings.csv

One expert on Gaussian tokens, in float32 but for the casts, with all of them and with some left
out. A cast to E4M3 by rows has 31.5 dB. The output of a block has gone through six that count
(tokens and weights of gate and of up, the activation, the second weight), which leaves 23.6 dB.
"""

import argparse
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import add_csv, write_rows
from torch_fp8.kernels.arguments import GateForm
from torch_fp8.ops.expert_gate import activation, activation_backward
from torch_fp8.ops.quantize import dequantize, quantize
from torch_fp8.quantization.metrics import sqnr_db
from torch_fp8.quantization.recipe import make_recipe

FILE = "expert_roundings.csv"
CASTS = ("x", "first", "activation", "second", "grad", "saved", "inner_grad")
"""Casts of tokens, both weights, the activation, the output's gradient, gate and up as they are
saved, and their gradient.
"""
LEFT_OUT = (
    *((), *((cast,) for cast in CASTS)),
    *(("saved", "first"), ("saved", "first", "second"), ("saved", "first", "x")),
)
RESULTS = ("y", "grad_x", "grad_first", "grad_second")
COLUMNS = ("left_out", *RESULTS)
ROWS, HIDDEN, WIDTH = 512, 256, 192


def rows() -> Iterator[dict[str, Any]]:
    """Yield the SQNR of all results in dB for each set of casts that is left out."""
    exact = block(())
    for names in LEFT_OUT:
        values = block([cast for cast in CASTS if cast not in names])
        decibels = [f"{sqnr_db(a, b):.1f}" for a, b in zip(exact, values, strict=True)]
        yield dict(zip(COLUMNS, (" ".join(names) or "none", *decibels), strict=True))


def block(casts: Collection[str]) -> tuple[Tensor, ...]:
    """Compute the output of a block and its gradients, in the order of `RESULTS`.

    Args:
        casts: casts that are made.
    """
    spec = make_recipe("rowwise").input

    def cast(name: str, value: Tensor, *, turned: bool = False) -> Tensor:
        if name not in casts:
            return value
        value = value.t() if turned else value
        values = dequantize(quantize(value.contiguous(), spec))
        return values.t() if turned else values

    generator = torch.Generator().manual_seed(0)
    x, first, second, grad = (
        torch.randn(size, generator=generator)
        for size in ((ROWS, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH), (ROWS, HIDDEN))
    )
    first, second, form = 0.1 * first, 0.1 * second, GateForm(False)
    x8, g8 = cast("x", x), cast("grad", grad)
    gate, up = (x8 @ cast("first", first).t()).chunk(2, 1)  # (R, I) each
    y = cast("activation", activation(gate, up, form)) @ cast("second", second).t()
    gate, up = cast("saved", gate), cast("saved", up)
    da = g8 @ cast("second", second, turned=True)  # (R, I)
    dh = cast("inner_grad", torch.cat(activation_backward(da, gate, up, form), 1))  # (R, 2I)
    dx = dh @ cast("first", first, turned=True)
    again = cast("activation", activation(gate, up, form))
    return y, dx, dh.t() @ x8, g8.t() @ again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_csv(parser, "expert_roundings")
    write_rows(parser.parse_args().csv, COLUMNS, list(rows()))


if __name__ == "__main__":
    main()
