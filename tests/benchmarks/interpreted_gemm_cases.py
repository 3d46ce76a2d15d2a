"""Runs the Triton GEMM in Triton's CPU interpreter; prints, as JSON, how cases differ from torch's.

Run by test_triton_gemm.py in a process of its own: the interpreter is chosen when Triton decorates
the kernels. Two of its operations are replaced: its conversions lose NaN in FP8 operands, and
carries in a result of bfloat16. They are given torch's. How the tensor core sums within a block is
for a card to say: the tests marked gpu.
"""

import itertools
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from benchmarks.evidence.interpreter import mend
from benchmarks.triton_gemm import TILES, blockwise_gemm
from torch_fp8.ops.quantize import QuantizedTensor, quantize
from torch_fp8.ops.scaled_mm import scaled_matmul_reference
from torch_fp8.quantization.formats import E4M3, E5M2
from torch_fp8.quantization.metrics import sqnr_db
from torch_fp8.quantization.recipe import CastSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
# (R, S, C)
SHAPES = {
    "one element": (1, 1, 1),
    "one tile": (128, 128, 128),
    "less than a block": (40, 24, 48),
    "tails": (150, 270, 300),
    "odd": (37, 131, 515),
    "two columns of tiles": (20, 300, 128),
    "more tiles than a group": (64 * 9 + 5, 130, 144),
    "no rows": (0, 16, 32),
    "no columns": (16, 0, 32),
    "nothing contracted": (16, 32, 0),
}


def float_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    a, b = (_as_float32(x) for x in (a, b))
    with np.errstate(all="ignore"):
        return interpreter.TensorHandle(a @ b + d.data, d.dtype.scalar)


def _as_float32(x):
    data = torch.from_numpy(np.ascontiguousarray(x.data).view(np.uint8))
    return data.view(FP8[x.dtype.scalar]).float().numpy()


def torch_fp_trunc(self, src, dst_type):
    if dst_type.scalar != tl.bfloat16:
        return self.cast_impl(src, dst_type)
    rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16)
    return interpreter.TensorHandle(rounded.numpy().view(np.uint16), dst_type.scalar)


mend()
interpreter.InterpreterBuilder.create_dot = float_dot
interpreter.InterpreterBuilder.create_fp_trunc = torch_fp_trunc


def spread(rows, cols, generator):
    """Gaussian, with rows of very different size."""
    x = torch.randn(rows, cols, generator=generator)
    return x * 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)


def operands(shape, granularity, generator, format=E4M3):
    rows, cols, contracted = shape
    a = quantize(spread(rows, contracted, generator), CastSpec(format, "block_1x128"))
    b = torch.randn(cols, contracted, generator=generator)  # products stay in float16's range
    return a, quantize(b, CastSpec(E4M3, granularity))


def difference(a, b, dtype, tile, bias=None):
    """What differs, or ''.

    Finite elements of each row are 100 dB close in float32; roundings of 8 and 11 bits give more
    than 50 and 60.
    """
    got, want = blockwise_gemm(a, b, dtype, tile, bias), scaled_matmul_reference(a, b, dtype, bias)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(want.isnan(), got.isnan()):
        return f"{int((finite != got.isfinite()).sum())} elements are not finite or should not be"
    if not finite.any() or torch.equal(got, want):
        return ""
    # Row by row: rows are of very different size.
    least = {torch.float32: 100, torch.bfloat16: 50, torch.float16: 60}[dtype]
    worst = min(
        (sqnr_db(w[f].double(), g[f].double()), i)
        for i, (w, g, f) in enumerate(zip(want, got, finite, strict=True))
        if f.any()
    )
    return "" if worst[0] >= least else f"row {worst[1]}: {worst[0]:.1f} dB"


def results():
    generator = torch.Generator().manual_seed(0)
    for granularity, (name, shape) in itertools.product(
        ("block_128x128", "block_1x128"), SHAPES.items()
    ):
        a, b = operands(shape, granularity, generator)
        bias = torch.randn(shape[1], generator=generator)
        found = {}
        for dtype, tile in itertools.product(DTYPES, TILES):
            found[f"{dtype} {tile}"] = difference(a, b, dtype, tile)
        for dtype in (torch.float32, torch.bfloat16):
            found[f"bias {dtype}"] = difference(a, b, torch.float32, TILES[0], bias.to(dtype))
        yield f"{granularity}, {name}", found

    for granularity in ("block_128x128", "block_1x128"):
        shape = (70, 140, 300)
        found = {}
        for operand, place in itertools.product((0, 1), ("payload", "scale")):
            pair = list(operands(shape, granularity, generator))
            qdata, scale = pair[operand].qdata.clone(), pair[operand].scale.clone()
            if place == "payload":
                qdata.view(torch.uint8)[3, 290] = 0x7F
            else:
                scale[-1, -1] = float("nan")
            pair[operand] = QuantizedTensor(qdata, scale, pair[operand].granularity)
            for tile in TILES:
                found[f"{operand} {place} {tile}"] = difference(*pair, torch.float32, tile)
        yield f"{granularity}, nan", found
        a, b = operands((33, 50, 200), granularity, generator, E5M2)
        yield f"{granularity}, e5m2", {"": difference(a, b, torch.float32, TILES[0])}


if __name__ == "__main__":
    found = {
        case: [f"{what}: {text}" for what, text in differences.items() if text]
        for case, differences in results()
    }
    json.dump(found, sys.stdout)
