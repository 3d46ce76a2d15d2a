"""Plays the calls of every operator's launcher under Triton's interpreter; prints what differs.

Run by test_replayed_interpreted.py in a process of its own. The first two calls go to the launcher,
the third is played, and what it makes and writes is compared bit for bit with what the launcher
makes and writes of the same tensors.
"""

import functools
import itertools
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from benchmarks.interpreter import mend
from torch_fp8.kernels import gate_up, rms_norm, smooth, swiglu, swiglu_backward, transpose
from torch_fp8.kernels import quantize as casts
from torch_fp8.kernels.arguments import (
    BackwardInputs,
    CastOptions,
    DelayedCastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
)
from torch_fp8.kernels.launch_tape import Replayed, Tape, recording
from torch_fp8.kernels.quantize_delayed import advance_history
from torch_fp8.ops import quantize_dbias, quantize_delayed

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
ODD = (48, 40)
"""Columns that are moved one by one."""
SHAPES = ((3, 272), (80, 272), ODD)
"""One tile holds the first, not the second."""


def unseen(kernel, grid, how, dtypes, *args):
    """Run an interpreted kernel, which takes pointers for what their tensors' dtypes are."""
    with _disable_current_modes():
        args = [x if d is None else x.view(d) for x, d in zip(args, dtypes, strict=True)]
        kernel.run(*args, grid=grid, warmup=False, **how)


def reported(kernel, grid):
    """Launch as `QuickKernel` does."""

    def launch(*args, **how):
        dtypes = [x.dtype if isinstance(x, torch.Tensor) else None for x in args]
        run = functools.partial(unseen, kernel, grid, how, dtypes)
        run(*args)
        recorder = recording()
        if recorder is not None:
            recorder.launched(kernel, args, (run, ()))

    return launch


def x(rows, cols, dtype=BF16):
    return torch.randn(rows, cols).to(dtype)


def history():
    return torch.rand(4) + 0.5, torch.zeros(2, dtype=torch.int32)


def number():
    return torch.rand(()) + 4


def cast(granularity, row=True, col=True, dtype=E4M3, **scale):
    return CastOptions(dtype, granularity, granularity == "block_1x32", row, col, **scale)


def delayed(row=True, col=True, dtype=E4M3):
    return DelayedCastOptions(*history(), dtype, "max", 0, row, col)


def backward(rows, cols, saved):
    gate, up = (x(rows, cols) for _ in range(2))
    if saved:
        (g, gs, *_), (u, us, *_) = (
            casts.quantize_2d(t, cast("block_1x128", col=False)) for t in (gate, up)
        )
        return BackwardInputs(x(rows, cols), g, gs, u, us, None, BF16)
    return BackwardInputs(x(rows, cols), gate, None, up, None, None, BF16)


def norm(rows, cols):
    return NormInputs(x(rows, cols), torch.rand(cols).bfloat16(), 1e-5, 0.0, BF16)


def known_norm(rows, cols):
    return NormWithRstd(x(rows, cols), torch.rand(cols).bfloat16(), torch.rand(rows), 0.0, BF16)


def norm_backward(rows, cols):
    weight, rstd = torch.rand(cols).bfloat16(), torch.rand(rows)
    return NormBackwardInputs(x(rows, cols), x(rows, cols), None, weight, rstd, 0.0, BF16, True)


def cases(r, c):
    """Yield name, launcher, and who makes its arguments."""
    for g, (row, col) in itertools.product(GRANULARITIES, ((True, False), (True, True))):
        how = f"{g}{', both' if col else ''}"
        yield (
            f"cast {how}",
            casts.quantize_2d,
            lambda g=g, row=row, col=col: (x(r, c), cast(g, row, col)),
        )
    yield "cast transposed", casts.quantize_2d, lambda: (x(c, r).t(), cast("tensorwise"))
    yield (
        "cast given",
        casts.quantize_2d,
        lambda: (x(r, c), cast("tensorwise", dtype=E5M2, scale=number())),
    )
    yield "cast amax", casts.quantize_2d, lambda: (x(r, c), cast("tensorwise", amax=number()))
    for g in ("tensorwise", "rowwise", "block_1x128"):
        yield (
            f"cast and sum {g}",
            quantize_dbias._quantize_2d_sum_cuda,
            lambda g=g: (x(r, c), cast(g), BF16),
        )
    for sums in (None, BF16):
        yield (
            f"cast delayed{'' if sums is None else ' and sum'}",
            quantize_delayed._quantize_2d_delayed_cuda,
            lambda sums=sums: (x(r, c), delayed(), torch.zeros(()), sums),
        )
    yield "history", advance_history, lambda: (history()[0], number(), number(), E4M3, "max", 0)
    yield "norm", rms_norm.rms_norm, lambda: (known_norm(r, c),)
    for save in (True, False):
        yield (
            f"norm statistics {save}",
            rms_norm.rms_norm_statistics,
            lambda save=save: (norm(r, c), save),
        )
    yield (
        "norm casts",
        rms_norm.rms_norm_quantize,
        lambda: (known_norm(r, c), cast("tensorwise", amax=number())),
    )
    for g in GRANULARITIES:
        yield (
            f"norm once {g}",
            rms_norm.rms_norm_quantize_once,
            lambda g=g: (norm(r, c), cast(g), False),
        )
    yield (
        "norm once delayed",
        rms_norm.rms_norm_quantize_once,
        lambda: (norm(r, c), delayed(), True),
    )
    yield (
        "norm once given",
        rms_norm.rms_norm_quantize_once,
        lambda: (norm(r, c), cast("tensorwise", col=False, scale=number()), False),
    )
    yield "norm backward", rms_norm.rms_norm_backward, lambda: (norm_backward(r, c),)
    yield "swiglu", swiglu.swiglu, lambda: (x(r, c), x(r, c), torch.rand(c))
    yield "swiglu saves", swiglu.swiglu_save, lambda: (x(r, c), x(r, c), None, True)
    for g in GRANULARITIES:
        yield (
            f"swiglu casts {g}",
            swiglu.swiglu_quantize,
            lambda g=g: (x(r, c), x(r, c), None, cast(g), g == "block_1x128"),
        )
    yield (
        "swiglu casts delayed",
        swiglu.swiglu_quantize,
        lambda: (x(r, c), x(r, c), None, delayed(), True),
    )
    for saved in (False, True):
        how = "" if not saved else " of what was saved"
        given = functools.partial(backward, r, c, saved)
        yield (
            f"swiglu backward{how}",
            swiglu_backward.swiglu_backward,
            lambda given=given: (given(),),
        )
        yield (
            f"gate_up backward{how}",
            gate_up.gate_up_backward,
            lambda given=given: (given(), True),
        )
        yield (
            f"swiglu backward amax{how}",
            swiglu_backward.swiglu_backward_amax,
            lambda given=given: (given(),),
        )
        for g in ("tensorwise", "block_1x128"):
            amax = {"tensorwise": lambda n: {"amax": torch.rand(n) + 4}}.get(g, lambda n: {})
            yield (
                f"swiglu backward casts {g}{how}",
                swiglu_backward.swiglu_backward_quantize,
                lambda given=given, g=g, amax=amax: (given(), cast(g, **amax(2)), None, None),
            )
        yield (
            f"swiglu backward casts delayed{how}",
            swiglu_backward.swiglu_backward_quantize,
            lambda given=given: (given(), delayed(dtype=E5M2), *history()),
        )
        yield (
            f"gate_up backward casts{how}",
            gate_up.gate_up_backward_quantize,
            lambda given=given: (given(), True, cast("block_1x128")),
        )
    yield "gate_up backward amax", gate_up.gate_up_backward_amax, lambda: (backward(r, c, True),)
    yield "channels", smooth.column_amax, lambda: (x(r, c),)
    yield "channels saved", smooth.swiglu_save_columns, lambda: (x(r, c), x(r, c), True)
    yield "factors", smooth.smooth_factors, lambda: (torch.rand(c),)
    yield (
        "smoothed cast",
        smooth.quantize_columns,
        lambda: (x(r, c), torch.rand(c), cast("tensorwise", amax=number())),
    )
    yield "transpose", transpose.transposed_bytes, lambda: (x(r, c).to(E4M3), -(-r // 16) * 16)


def tensors(value):
    """Return the tensors in tuples, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value if isinstance(part, (tuple, torch.Tensor)) for t in tensors(part)]


def copied(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
    if isinstance(value, tuple):
        parts = [copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def alike(a, b):
    """Whether two tensors have the same shape, strides, dtype and bytes."""
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def differences(launcher, make_args):
    """Yield in which call what differed."""
    counted = []

    def counting(*args):
        counted.append(1)
        return launcher(*args)

    replayed = Replayed(counting)
    for call in range(3):
        args = make_args()
        twins = copied(args)
        made, expected = replayed(*args), launcher(*twins)
        pairs = zip(tensors((made, args)), tensors((expected, twins)), strict=True)
        yield from (
            f"tensor {i} of call {call}" for i, (a, b) in enumerate(pairs) if not alike(a, b)
        )
        if isinstance(made, tuple) and [t is None for t in made] != [t is None for t in expected]:
            yield f"what is None in call {call}"
    if len(counted) != 2 or not all(type(tape) is Tape for tape in replayed._tapes.values()):
        yield f"the launcher was called {len(counted)} times"


mend()
interpreter.InterpretedFunction.__getitem__ = reported
for module in (quantize_dbias, quantize_delayed):
    module.emulates_casts = lambda device: False
np.seterr(all="ignore")
torch.manual_seed(0)
found = {}
for shape in SHAPES:
    for name, launcher, make_args in cases(*shape):
        if shape != ODD or name.startswith(("cast", "swiglu")):
            found[f"{name}, {shape[0]} x {shape[1]}"] = list(differences(launcher, make_args))
json.dump(found, sys.stdout)
