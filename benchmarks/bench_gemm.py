"""The three GEMMs of the linears of a Llama-3.1-8B block, without casts: time and error of each.

    python -m benchmarks.bench_gemm            # on a GPU; runs/benchmarks/gemm.csv
    python -m benchmarks.bench_gemm --toy      # small sizes, also on a CPU

BF16, and FP8 with one scale per tensor, per row and per block, accumulated fast (in the tensor
core's own accumulator) and not, interleaved; ``blockwise`` by torch and, a row per tile, by the
kernel of `benchmarks.triton_gemm`. ``error`` is ``|out - exact| / |exact|`` against the
product of the same FP8 operands in float64, on a corner of the result: the error of the
accumulation and, if the kernel writes no float32, of rounding the result to BF16. Rows of gemm
``contraction`` have a small result and a growing contraction dimension K. They show the error as a
function of K, for normal operands and for positive ones, whose sums grow with K.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.card import free, measured_rates
from benchmarks.measurement import (
    NOT_REACHED,
    Budget,
    Table,
    default_device,
    environment,
    interleaved,
    note_of,
    parser,
    print_table,
)
from benchmarks.plot import draw
from benchmarks.roofline import Rates, gemm_seconds
from benchmarks.shapes import LLAMA_3_1_8B_BLOCK, TOKENS, TOY_BLOCK, TOY_TOKENS
from benchmarks.triton_gemm import TILES, Tile, blockwise_gemm, runs_triton_gemm
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.ops.scaled_mm import scaled_matmul
from torch_fp8.quantization.recipe import GEMMS, CastSpec, make_recipe

COLUMNS = (
    *("gemm", "M", "K", "N", "rows", "cols", "contracted", "input", "variant"),
    *("median_ms", "p20_ms", "p80_ms", "tflops", "floor_ms", "floor_share", "speedup"),
    *("error", "note"),
)
BF16 = "bf16"


class Variant(NamedTuple):
    """An FP8 GEMM: the recipe of its operands, and the function that multiplies them.

    Attributes:
        recipe: its name.
        fast: accumulate fast. Block-scaled GEMMs are promoted after every block.
        tile: tile of the Triton kernel, or None for torch's scaled matmul.
    """

    recipe: str
    fast: bool = False
    tile: Tile | None = None

    def __call__(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
        if self.tile is None:
            return scaled_matmul(a, b, out_dtype, fast_accum=self.fast)
        if not runs_triton_gemm(a.qdata.device):
            raise ValueError("the Triton kernel needs sm_90 or later")
        return blockwise_gemm(a, b, out_dtype, self.tile)


VARIANTS = {
    "tensorwise": Variant("tensorwise"),
    "tensorwise, fast": Variant("tensorwise", fast=True),
    "rowwise": Variant("rowwise"),
    "rowwise, fast": Variant("rowwise", fast=True),
    "blockwise": Variant("blockwise"),
    "mxfp8": Variant("mxfp8"),
    **{f"blockwise, Triton {tile}": Variant("blockwise", tile=tile) for tile in TILES},
}
CORNER = 256
"""The number of rows and columns of the result whose error is measured."""
CONTRACTIONS, TOY_CONTRACTIONS = (512, 2048, 8192, 32768, 131072), (64, 256)
REPETITIONS = 15
WAIT_MS = 1.0


def main() -> None:
    arguments = parser("gemm", __doc__)
    arguments.add_argument("--tokens", nargs="+", type=int, help="rows M")
    arguments = arguments.parse_args()
    device, budget = default_device(), Budget(arguments.budget)
    table = Table(arguments.csv, COLUMNS, ("gemm", "M", "K", "N"), environment(device))
    block = TOY_BLOCK if arguments.toy else LLAMA_3_1_8B_BLOCK
    table.add(contraction_rows(TOY_CONTRACTIONS if arguments.toy else CONTRACTIONS, device))
    for m in arguments.tokens or (TOY_TOKENS if arguments.toy else TOKENS):
        for k, n in dict.fromkeys(block.values()):
            if not budget.fits():
                table.add([{"gemm": g, "M": m, "K": k, "N": n, "note": NOT_REACHED} for g in GEMMS])
                continue
            with budget.piece():
                rates = measured_rates(device, toy=arguments.toy)
                for gemm in GEMMS:
                    table.add(gemm_rows(gemm, m, k, n, rates, device))
                    free(device)
    draw(arguments.csv)
    shown = ("gemm", "M", "K", "N", "variant", "median_ms", "speedup", "error", "note")
    print_table(shown, table.rows)


def gemm_rows(
    gemm: str, m: int, k: int, n: int, rates: Rates, device: torch.device
) -> list[dict[str, object]]:
    """Return a row per variant of one GEMM of a linear on m rows, K = k, N = n."""
    torch.manual_seed(0)
    rows, cols, contracted = {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[gemm]
    a = torch.randn(rows, contracted, device=device, dtype=torch.bfloat16)
    b = torch.randn(cols, contracted, device=device, dtype=torch.bfloat16)
    out = torch.empty(rows, cols, device=device, dtype=torch.bfloat16)
    runs = {BF16: lambda: torch.mm(a, b.t(), out=out)}
    errors = {BF16: error(torch.mm(a[:CORNER], b[:CORNER].t()), a, b)}
    notes: dict[str, str] = {}
    for name, variant in VARIANTS.items():
        try:
            pair = operands(variant.recipe, gemm, a, b)
            errors[name] = error(product(variant, *pair), *map(dequantized, pair))
        except Exception as failure:
            notes[name] = note_of(failure)
            continue

        def run(variant=variant, pair=pair) -> None:
            variant(*pair, torch.bfloat16)

        runs[name] = run
    timings = interleaved(runs, device, REPETITIONS, wait_ms=WAIT_MS, failures=notes)
    result = []
    for name in (BF16, *VARIANTS):
        row = {"gemm": gemm, "M": m, "K": k, "N": n, "rows": rows, "cols": cols}
        row |= {"contracted": contracted, "input": "normal", "variant": name}
        row["note"] = notes.get(name, "")
        if name in timings:
            median = timings[name].median
            floor = gemm_seconds(rows, cols, contracted, rates, fp8=name != BF16) * 1e3
            row |= timings[name].columns() | {
                "tflops": round(2 * rows * cols * contracted / median / 1e9, 1),
                "floor_ms": round(floor, 4),
                "floor_share": round(floor / median, 3),
                "speedup": round(timings[BF16].median / median, 3) if BF16 in timings else "",
                "error": f"{errors[name]:.3g}",
            }
        result.append(row)
    return result


def contraction_rows(
    contractions: tuple[int, ...], device: torch.device
) -> list[dict[str, object]]:
    """Return each variant's error against the contraction dimension, (CORNER, K) times (K,
    CORNER).
    """
    result = []
    for contracted in contractions:
        for kind in ("normal", "positive"):
            torch.manual_seed(0)
            a, b = (torch.randn(CORNER, contracted, device=device) for _ in range(2))
            if kind == "positive":
                a, b = a.abs(), b.abs()
            for name, variant in VARIANTS.items():
                row: dict[str, object] = {"gemm": "contraction", "contracted": contracted}
                row |= {"K": contracted, "rows": CORNER, "cols": CORNER}
                row |= {"input": kind, "variant": name}
                try:
                    pair = operands(variant.recipe, "fprop", a, b)
                    row["error"] = f"{error(product(variant, *pair), *map(dequantized, pair)):.3g}"
                except Exception as failure:
                    row["note"] = note_of(failure)
                result.append(row)
    return result


def operands(
    recipe: str, gemm: str, a: Tensor, b: Tensor
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return both operands of a GEMM as the recipe casts them."""
    specs: dict[str, tuple[CastSpec, CastSpec]] = {
        name: (of.a, of.b) for name, of in zip(GEMMS, make_recipe(recipe).gemms, strict=True)
    }
    return quantize(a, specs[gemm][0]), quantize(b, specs[gemm][1])


def product(variant: Variant, a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """Return the result in float32 where the kernel writes that, else in BF16."""
    try:
        return variant(a, b, torch.float32)
    except (RuntimeError, ValueError):
        return variant(a, b, torch.bfloat16)


def dequantized(x: QuantizedTensor) -> Tensor:
    """Return the first rows of an operand, with the scales in them, as float32."""
    return dequantize(x)[:CORNER]


def error(out: Tensor, a: Tensor, b: Tensor) -> float:
    """Compute ``|out - a b^T| / |a b^T|`` in float64 on the first CORNER rows and columns."""
    exact = a[:CORNER].double() @ b[:CORNER].double().t()
    return float((out[:CORNER, :CORNER].double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
