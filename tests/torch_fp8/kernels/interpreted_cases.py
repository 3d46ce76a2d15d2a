"""Runs the kernels under Triton's CPU interpreter and prints, as JSON, which cases differ how.

Run by test_quantize_interpreted.py in a process of its own: the interpreter is chosen when Triton
decorates the kernels. Three of its operations are replaced, because they are not what the hardware
does: its FP8 conversion loses carries, its fused multiply-add rounds twice, its fast division is
exact. They are given torch's conversion, float64's arithmetic and an error of 2 ulp, so that what
is left is compared bit for bit. The hardware's own conversion is compared on a card
(test_quantize_gpu.py).
"""

import itertools
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter import mend
from tests.kernel_cases import casts
from tests.kernel_cases.comparison import Mismatch
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.cast_launch import (
    is_odd,
)
from torch_fp8.kernels.column_sums import TileSums
from torch_fp8.kernels.fp8_cast import divide, reciprocal
from torch_fp8.kernels.quantize import (
    quantize_2d,
)
from torch_fp8.kernels.transpose import transposed_bytes
from torch_fp8.quantization.scaling import tensor_amax

# (format, power_of_two, row, col)
CHOICES = (
    ("e4m3", False, True, True),
    ("e4m3", True, True, True),
    ("e5m2", False, True, True),
)
ONE_LAYOUT = (("e4m3", False, True, False), ("e4m3", False, False, True))
SUMMED = ("odd shape", "rows to pad", "one tile", "tails", "transposed", "nan")
FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")


def exact_fma(self, x, y, z):
    with np.errstate(all="ignore"):
        value = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(value.astype(np.float32), z.dtype.scalar)


def approximate_division(self, lhs, rhs):
    """2 ulp off, up or down: what the hardware's fast division may be."""
    with np.errstate(all="ignore"):
        quotient = (lhs.data / rhs.data).astype(np.float32)
        towards = np.where(rhs.data.view(np.int32) % 2, np.float32(-np.inf), np.float32(np.inf))
        off = np.nextafter(np.nextafter(quotient, towards), towards)
    return interpreter.TensorHandle(off, lhs.dtype.scalar)


def torch_fp_to_fp(self, src, dst_type, rounding_mode):
    dtype = FP8[dst_type.scalar]
    data = torch.from_numpy(np.ascontiguousarray(src.data)).to(dtype).view(torch.uint8).numpy()
    return interpreter.TensorHandle(data, dst_type.scalar)


mend()
interpreter.InterpreterBuilder.create_fma = exact_fma
interpreter.InterpreterBuilder.create_fdiv = approximate_division
interpreter.InterpreterBuilder.create_fp_to_fp = torch_fp_to_fp


@triton.jit
def divide_kernel(x_ptr, scale_ptr, r_ptr, y_ptr, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    r, s = reciprocal(tl.load(scale_ptr + i), False)
    tl.store(r_ptr + i, r)
    tl.store(y_ptr + i, divide(tl.load(x_ptr + i), r, s, False))


def division():
    """Quotients of the mantissas whose reciprocals are hardest to round, on FP8's boundaries."""
    scale = (torch.arange(2**24 - 2**17, 2**24) * 2.0**-23).float()
    boundaries = torch.tensor([1.0, 1.0625, 1.3125, 1.375, 1.5, 1.6875, 1.9375])
    x = boundaries.repeat(2**15)[: 2**17] * scale
    x = x + (torch.arange(2**17) % 5 - 2) * 2.0**-23
    x[-1] = 1.0  # over 2 - 2^-23: the one quotient known to need the second correction
    r, y = torch.empty_like(x), torch.empty_like(x)
    divide_kernel[(2,)](x, scale, r, y, SIZE=2**16)
    found = difference(r, 1.0 / scale), difference(y, x / scale)
    return [text for text in found if text]


def spread(rows, cols, generator):
    """Gaussian, with rows of very different size."""
    x = torch.randn(rows, cols, generator=generator)
    return x * 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)


def matrices(generator):
    """Name -> matrix: odd shapes, strides, types and values."""
    big = spread(270, 440, generator)
    yield "one element", torch.randn(1, 1, generator=generator)
    yield "odd shape", spread(37, 131, generator).bfloat16()
    yield "rows to pad", spread(133, 144, generator).bfloat16()
    yield "columns to pad", spread(144, 37, generator).bfloat16().t()
    yield "one tile", spread(128, 128, generator).bfloat16()
    yield "tails", spread(130, 140, generator).half()
    yield "few rows", spread(3, 272, generator).bfloat16()
    yield "transposed", spread(150, 70, generator).bfloat16().t()
    yield "sliced", big[:120:2, 1:200].bfloat16()[1:]
    yield "no unit stride", big[:96:2, ::3]
    yield "expanded", torch.randn(1, 96, generator=generator).expand(20, 96)
    yield "no rows", torch.zeros(0, 48)
    yield "no columns", torch.zeros(48, 0)
    zeros = spread(30, 140, generator)
    zeros[:, 20:60] = 0
    zeros[3] = -0.0
    yield "zeros", zeros
    yield "denormal", spread(20, 150, generator) * 1e-40
    yield "tiny", spread(20, 150, generator) * 1e-33
    yield "huge", (torch.rand(20, 150, generator=generator) - 0.5) * 6e38
    inf = float("inf")
    nan = float("nan")
    for name, values in (("inf", (inf, -inf)), ("nan", (nan,)), ("nan, rows to pad", (nan,))):
        x = spread(20, 144 if "rows" in name else 150, generator)
        for i, value in enumerate(values):
            x[3 + i, 140 - 20 * i] = value
        yield name, x.bfloat16()


def difference(got, want):
    """What differs, or ''. NaN equals NaN: which one comes out is the platform's choice."""
    if got is None or want is None:
        return "" if got is None and (want is None or want.numel() == 0) else "missing"
    laid_out_alike = got.is_contiguous() == want.is_contiguous() and (
        want.ndim < 2 or got.t().is_contiguous() == want.t().is_contiguous()
    )
    if got.shape != want.shape or got.dtype != want.dtype or not laid_out_alike:
        return f"{got.dtype} {tuple(got.shape)} {got.stride()}, want {want.dtype} {want.shape}"
    if got.dtype.itemsize == 1:
        bits, wanted = got.view(torch.uint8), want.view(torch.uint8)
    else:
        bits, wanted = got.view(torch.int32), want.view(torch.int32)
    wrong = (bits != wanted) & ~(got.float().isnan() & want.float().isnan())
    if not wrong.any():
        return ""
    i = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} differ, first {i}: {got[i].item()} instead of {want[i].item()}"


def sum_difference(got, x):
    """'' where sums over the rows of x are within float32's error, or where x is not finite."""
    if got.shape != (x.shape[1],) or got.dtype != torch.float32:
        return f"sums {got.dtype} {tuple(got.shape)}"
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    wrong = (got - exact).abs() > size * x.shape[0] * 2.0**-24 + 1e-45
    wrong &= exact.abs() < 3e38
    wrong |= got.isnan() != exact.float().isnan()
    return f"{int(wrong.sum())} sums differ" if wrong.any() else ""


def compare(got, want):
    parts = ("row", "row scale", "col", "col scale")
    found = {p: difference(g, w) for p, g, w in zip(parts, got, want, strict=True)}
    return "; ".join(f"{part}: {text}" for part, text in found.items() if text)


def reference(x, options):
    made = casts.reference(x, options)
    row, col = options.rowwise, options.columnwise
    wanted = (row, row or options.granularity == "tensorwise", col, col)
    return [part if is_wanted else None for part, is_wanted in zip(made, wanted, strict=True)]


def slots(x, options):
    """What differs where a slot is raised, in every layout, with sums and without."""
    layouts = itertools.product((True, False), (True, False))
    for (row, col), before, sums in itertools.product(layouts, (0.0, 3e38), (None, TileSums())):
        slot, how = torch.tensor(before), options._replace(rowwise=row, columnwise=col)
        made = quantize_2d(x, how._replace(amax=slot), sums)
        found = compare(made, reference(x, how))
        found += difference(slot, torch.maximum(torch.tensor(before), tensor_amax(x)))
        if sums is not None:
            found += sum_difference(sums.total(x, torch.float32), x)
        if found:
            yield f"slot of {before}, {row=} {col=} sums={sums is not None}: {found}"


def results():
    for granularity, (name, x) in itertools.product(
        GRANULARITIES, matrices(torch.Generator().manual_seed(0))
    ):
        failures, more = [], ONE_LAYOUT if name in ("tails", "few rows") else ()
        for fmt, power_of_two, row, col in CHOICES + more:
            options = CastOptions(DTYPES[fmt], granularity, power_of_two, row, col)
            found = compare(quantize_2d(x, options), reference(x, options))
            if found:
                failures.append(f"{fmt} power_of_two={power_of_two} {row=} {col=}: {found}")
        yield f"{granularity}, {name}", failures

    for name, x in matrices(torch.Generator().manual_seed(1)):
        failures = []
        for fmt, value in itertools.product(DTYPES, (0.37, 2.0**-120, float("inf"))):
            scale = torch.tensor(value)
            options = CastOptions(DTYPES[fmt], "tensorwise", False, True, True, scale)
            found = compare(quantize_2d(x, options), reference(x, options))
            if found:
                failures.append(f"{fmt} scale {value}: {found}")
            if value == 0.37:  # the amax is that of x, whatever the scale
                failures += [f"{fmt} scale {value}, {text}" for text in slots(x, options)]
        for fmt, power_of_two, row, col in CHOICES + ONE_LAYOUT:
            options = CastOptions(DTYPES[fmt], "tensorwise", power_of_two, row, col)
            known = options._replace(amax=tensor_amax(x))
            found = compare(quantize_2d(x, known), reference(x, options))
            if found:
                failures.append(f"{fmt} known amax, power_of_two={power_of_two}: {found}")
        yield f"known scale, {name}", failures

    for name, x in matrices(torch.Generator().manual_seed(3)):
        if name not in SUMMED:
            continue
        for granularity in ("tensorwise", "rowwise", "block_1x128", "block_1x32"):
            failures = []
            for fmt, power_of_two, row, col in CHOICES[:1] + ONE_LAYOUT:
                options = CastOptions(DTYPES[fmt], granularity, power_of_two, row, col)
                sums = TileSums()
                found = compare(quantize_2d(x, options, sums), reference(x, options))
                found += sum_difference(sums.total(x, torch.float32), x)
                # A cast by row has no tiles, and that of x^T by column is one of x by row.
                in_tiles = not (granularity.startswith("block") and is_odd(x))
                in_tiles &= granularity != "rowwise" or (col and name != "transposed")
                if in_tiles and sums.partial is None:
                    found += "the sums took a read of their own"
                if found:
                    failures.append(f"{row=} {col=}: {found}")
            yield f"sums, {granularity}, {name}", failures

    x, sums = torch.randn(200, 33), TileSums()
    sums.allocate(x, 200).copy_(x)  # a tile for each row
    found = sum_difference(sums.total(x, torch.float32), x)
    yield "sums of many tiles", [found] if found else []

    failures = []
    try:
        casts.check_transpose(transposed_bytes, "cpu", ((1, 1), (37, 131), (130, 272), (0, 48)))
    except Mismatch as difference:
        failures.append(str(difference))
    yield "transpose", failures

    generator = torch.Generator().manual_seed(2)
    long = spread(3, 16500, generator).bfloat16()
    options = CastOptions(torch.float8_e4m3fn, "rowwise", False, True, False)
    found = compare(quantize_2d(long, options), reference(long, options))
    yield "rowwise, longer than the registers hold", [found] if found else []
    yield "division", division()


if __name__ == "__main__":
    json.dump(dict(results()), sys.stdout)
