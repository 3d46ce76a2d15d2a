"""Runs the kernels of 8-bit gradients under Triton's CPU interpreter; prints what differs, as JSON.

Run by test_grad_codec_interpreted.py in a process of its own, as interpreted_cases.py is.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from conftest import just_rounded_up
from triton.runtime import interpreter

from tests.interpreter import mend
from torch_fp8.kernels import grad_codec as kernels
from torch_fp8.ops import grad_codec
from torch_fp8.quantization.stochastic_rounding import stream_keys

SHAPES = {
    "flat, several programs": (9, 512),
    "a group and a half": (5, 48),
    "odd": (40, 33),
    "one row": (1, 96),
    "short": (3, 7),
    "long rows": (2, 2064),
    "no rows": (0, 64),
    "no columns": (64, 0),
}


def torch_fp_trunc(self, src, dst_type):
    """To nearest even; the interpreter cuts the lower bits off."""
    data = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16)
    return interpreter.TensorHandle(data.numpy().view(np.uint16), dst_type.scalar)


mend()
interpreter.InterpreterBuilder.create_fp_trunc = torch_fp_trunc


def gradient(rows, cols, dtype, seed):
    """Rows of every size, an Inf and a NaN where there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x *= 2.0 ** torch.randint(-8, 9, (rows, 1), generator=generator)
    if rows > 4 and cols:
        x[4, 1], x[3, 2], x[2] = float("inf"), float("nan"), 0
    return x.to(dtype)


def difference(got, want):
    """Of codes and scales; codes of groups that read NaN are free."""
    free = (want.scale == 255).repeat_interleave(32, 1)[:, : want.qdata.shape[1]]
    wrong = int(((got[0] != want.qdata) & ~free).sum()), int((got[1] != want.scale).sum())
    return f"{wrong[0]} codes, {wrong[1]} scales" if any(wrong) else ""


def encoded(x, keys):
    """Codes and scales by the kernel."""
    qdata, scale = (torch.empty_like(part) for part in grad_codec.quantize_gradient(x, keys)[:2])
    kernels.encode_gradient(x, qdata, scale, None, keys)
    return qdata, scale


def sums(shape, dtype):
    """Encoding, and accumulating with a multiplier."""
    for i in range(3):
        keys, x = stream_keys(i), gradient(*shape, dtype, i)
        if i == 0:
            got = encoded(x, keys)
            target = grad_codec.quantize_gradient(x, keys)
        else:
            got = tuple(part.clone() for part in target[:2])
            target.multiplier.fill_(0.37)
            kernels.encode_gradient(x, *got, target.multiplier, keys)
            grad_codec.accumulate_gradient(target, x, keys)
        yield difference(got, target)
    target.multiplier.fill_(0.37)
    got = kernels.dequantize_gradient(*target, dtype)
    want = grad_codec.decode_gradient(target, dtype)
    same = (got == want) | (got.isnan() & want.isnan())
    yield "" if got.dtype == dtype and same.all() else f"{int((~same).sum())} decoded"


def results():
    for name, shape in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            failures = [text for text in sums(shape, dtype) if text]
            yield f"{name}, {str(dtype).removeprefix('torch.')}", failures
    shifted = torch.randn(1 + 9 * 512)[1:].view(9, 512)
    want = grad_codec.quantize_gradient(shifted, (1, 2))
    distance = difference(encoded(shifted, (1, 2)), want)
    yield "address of an odd element", [distance] if distance else []
    x = just_rounded_up(64, 512, (1, 2))
    want = grad_codec.quantize_gradient(x, (1, 2))
    up = grad_codec.decode_gradient(want, x.dtype) >= x
    distance = difference(encoded(x, (1, 2)), want)
    yield "just rounded up", [distance] * bool(distance) + ["by the reference"] * (not up.all())


json.dump(dict(results()), sys.stdout)
