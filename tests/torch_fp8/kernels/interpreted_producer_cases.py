"""Runs the kernels of RMSNorm and SwiGLU under Triton's CPU interpreter; prints what differs.

Run by test_producers_interpreted.py in a process of its own. The interpreter's conversions to and
from FP8 and BF16, its fused multiply-add and its division are replaced, as in interpreted_cases.py.

Bytes are compared bit for bit with the cast of the value that the kernel for plain results makes of
the same input, and that value with the reference's, within a few ulp of float32: sums have another
order, and exp and division other last bits, as on a card.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter import mend
from torch_fp8.kernels import rms_norm as norm_kernels
from torch_fp8.kernels import smooth as smooth_kernels
from torch_fp8.kernels import swiglu as swiglu_kernels
from torch_fp8.kernels import swiglu_backward as backward_kernels
from torch_fp8.kernels.arguments import (
    BackwardInputs,
    CastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
)
from torch_fp8.ops import fused_quantize, rms_norm, smooth, swiglu
from torch_fp8.ops import swiglu_backward as backward
from torch_fp8.quantization.scaling import tensor_amax

BF16, EPS = torch.bfloat16, 1e-5
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}
# (dtype, granularity, what is known of the scale, power_of_two, row, col)
CHOICES = (
    (E4M3, "tensorwise", "amax", True, True, True),
    (E4M3, "tensorwise", "scale", False, True, True),
    (E4M3, "tensorwise", "slot", False, True, True),
    (E4M3, "block_1x128", None, True, True, True),
    (E4M3, "block_128x128", None, True, True, True),
)
MORE_CHOICES = (  # for one input
    (E5M2, "tensorwise", "amax", False, True, False),
    (E4M3, "tensorwise", "scale", False, True, False),
    (E4M3, "tensorwise", "slot", False, True, False),
    (E5M2, "tensorwise", "slot", False, False, True),
    (E4M3, "rowwise", None, False, True, True),
    (E5M2, "block_1x128", None, False, False, True),
    (E4M3, "block_1x128", None, True, True, False),
    (E4M3, "block_128x128", None, True, True, False),
    (E4M3, "block_1x32", None, True, True, True),
)
FOUND = ((E4M3, "tensorwise", None, False, True, True),)  # where the producer finds the amax
MORE_FOUND = (
    (E4M3, "tensorwise", None, True, True, False),
    (E5M2, "tensorwise", None, False, False, True),
)


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
    return interpreter.TensorHandle(np.where(quotient == 0, quotient, off), lhs.dtype.scalar)


def torch_fp_to_fp(self, src, dst_type, rounding_mode):
    data = torch.from_numpy(np.ascontiguousarray(src.data))
    if src.dtype.scalar in FP8:
        data = data.view(FP8[src.dtype.scalar]).float()
    else:
        data = data.to(FP8[dst_type.scalar]).view(torch.uint8)
    return interpreter.TensorHandle(data.numpy(), dst_type.scalar)


fp_trunc = interpreter.InterpreterBuilder.create_fp_trunc


def torch_fp_trunc(self, src, dst_type):
    """BF16 to nearest even; the interpreter cuts the lower bits off."""
    if dst_type.scalar != tl.bfloat16:
        return fp_trunc(self, src, dst_type)
    data = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16)
    return interpreter.TensorHandle(data.numpy().view(np.uint16), dst_type.scalar)


mend()
interpreter.InterpreterBuilder.create_fma = exact_fma
interpreter.InterpreterBuilder.create_fdiv = approximate_division
interpreter.InterpreterBuilder.create_fp_to_fp = torch_fp_to_fp
interpreter.InterpreterBuilder.create_fp_trunc = torch_fp_trunc


def spread(rows, cols, generator):
    """Gaussian, with rows of very different size."""
    x = torch.randn(rows, cols, generator=generator)
    return x * 2.0 ** torch.randint(-4, 5, (rows, 1), generator=generator)


def matrices():
    """Name -> (R, C): shapes, strides, types and values."""
    generator = torch.Generator().manual_seed(0)
    big = spread(600, 660, generator)
    yield "one tile", spread(128, 128, generator).bfloat16()
    yield "tails", spread(144, 208, generator).bfloat16()
    yield "tails, float32", spread(272, 48, generator)
    yield "float16", spread(32, 160, generator).half()
    yield "odd", spread(37, 131, generator).bfloat16()
    yield "rows to pad", spread(133, 144, generator).bfloat16()
    yield "129 x 127", spread(129, 127, generator).bfloat16()
    yield "one row", spread(1, 160, generator).bfloat16()
    yield "few rows", spread(17, 272, generator).bfloat16()
    yield "one column", spread(48, 1, generator).bfloat16()
    yield "one element", spread(1, 1, generator)
    yield "no rows", torch.zeros(0, 48)
    yield "no columns", torch.zeros(48, 0)
    yield "transposed", spread(160, 48, generator).bfloat16().t()
    yield "sliced", big[::2, 16:176].bfloat16()[:48]
    yield "no unit stride", big[:48, ::3].bfloat16()
    zeros = spread(32, 144, generator)
    zeros[:, 20:60], zeros[3] = 0, -0.0
    yield "zeros", zeros.bfloat16()
    inf = float("inf")
    for name, values in (("inf", (inf, -inf)), ("nan", (float("nan"),))):
        x = spread(48, 176, generator)
        for i, value in enumerate(values):
            x[3 + i, 140 - 20 * i] = value
        yield name, x.bfloat16()


def differs(got, want):
    """What differs in bits, or ''. NaN equals NaN: which one comes out is the platform's choice."""
    if got is None or want is None:
        absent = [t is None or t.shape == (0,) for t in (got, want)]
        return "" if all(absent) else "only one of the two exists"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
    if got.is_contiguous() != want.is_contiguous():
        return f"strides {got.stride()}, want {want.stride()}"
    same = (got.float() == want.float()) | (got.float().isnan() & want.float().isnan())
    return "" if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} differ"


def far(got, want, ulps=16):
    """What is further apart than an ulp of its type, or some of float32 of the row's largest."""
    if got.shape != want.shape or got.dtype != want.dtype or not got.is_contiguous():
        return f"{got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
    if not got.numel():
        return ""
    step = torch.finfo(got.dtype).eps
    got, want = got.float(), want.float()
    size = want.nan_to_num(0, 0, 0).abs()
    largest = size.amax(-1, keepdim=True) if size.ndim else size
    near = (got - want).abs() <= step * size + ulps * 2.0**-23 * largest
    near |= (got == want) | (got.isnan() & want.isnan())
    return "" if bool(near.all()) else f"{int((~near).sum())} of {near.numel()} far off"


def named(found):
    return [f"{name}: {text}" for name, text in found if text]


def columns(cols, value=1.0):
    """(C,) of a stride that is not 1."""
    return (torch.rand(cols, 2, generator=torch.Generator().manual_seed(1)) + value)[:, 1]


def casts(known_amax, more, found=()):
    """Name and options of every cast; those of `found` know nothing of the scale."""
    for dtype, granularity, known, *flags in CHOICES + (MORE_CHOICES if more else ()) + found:
        amax = {"amax": known_amax, "slot": torch.tensor(0.0)}.get(known)
        scale = torch.tensor(0.02) if known in ("scale", "slot") else None
        name = f"{granularity} {known} {str(dtype)[-6:]} {flags}"
        yield name, CastOptions(dtype, granularity, *flags, scale, amax)


SMOOTHED = ("tails", "odd", "no rows", "sliced", "inf", "nan")
LAYOUTS = ("row", "row scale", "col", "col scale")
SAVED_PARTS = ("gate", "gate scale", "up", "up scale")


def compare_cast(name, got, y, cast):
    """``(q, s, qt, st)`` with the cast of y, the plain result, and a slot, which was zero."""
    if cast.raises_amax:
        yield f"{name} slot", differs(cast.amax, tensor_amax(y))
        cast = cast._replace(amax=None)
    yield from compare(name, got, fused_quantize.cast_result(y, cast, cast.needs_amax))


def compare(name, got, want, parts=LAYOUTS):
    for part, g, w in zip(parts, got, want, strict=True):
        yield f"{name} {part}", differs(g, w)


def norm_statistics(x, offset):
    """Those, and the result."""
    weight, out = columns(x.shape[1]), x.dtype
    inputs = NormInputs(x, weight, EPS, offset, out)
    want = rms_norm.rms_norm_statistics.reference(inputs, True)
    got = norm_kernels.rms_norm_statistics(inputs, True)
    yield "rstd", far(got[0], want[0])
    yield "amax", far(got[1], want[1], 2**16 if out != torch.float32 else 16)
    yield from compare("saved", got[2:], want[2:], ("x", "scale"))
    without = norm_kernels.rms_norm_statistics(inputs, False)
    yield from compare(
        "not saved",
        without[1:],
        (got[1], None, None),
        ("amax", "x", "scale"),
    )
    rstd = torch.stack([got[0], got[0]], 1)[:, 1]
    y = norm_kernels.rms_norm(NormWithRstd(x, weight, rstd, offset, out))
    yield "y", differs(y, rms_norm.rms_norm.reference(NormWithRstd(x, weight, rstd, offset, out)))
    yield "amax of y", differs(got[1], tensor_amax(y))


def norm_casts(x, offset, more=False):
    weight, out = columns(x.shape[1]), x.dtype
    rstd, *_ = rms_norm.rms_norm_statistics.reference(
        NormInputs(x, weight, EPS, offset, out), False
    )
    rstd = torch.stack([rstd, rstd], 1)[:, 1]
    y = rms_norm.rms_norm.reference(NormWithRstd(x, weight, rstd, offset, out))
    for name, cast in casts(tensor_amax(y), more):
        made = norm_kernels.rms_norm_quantize(NormWithRstd(x, weight, rstd, offset, out), cast)
        yield from compare_cast(name, made, y, cast)


def norm_once(x, offset, more=False):
    weight, out = columns(x.shape[1]), x.dtype
    for name, cast in casts(torch.ones(()), more, FOUND + (MORE_FOUND if more else ())):
        for save in (True, False) if more else (True,):
            if cast.amax is not None and cast.scale is None:
                continue
            if cast.raises_amax:
                cast.amax.zero_()
            made = norm_kernels.rms_norm_quantize_once(
                NormInputs(x, weight, EPS, offset, out), cast, save
            )
            *layouts, rstd, saved, saved_scale = made
            want = rms_norm.rms_norm_statistics.reference(
                NormInputs(x, weight, EPS, offset, out), save
            )
            yield f"{name} rstd", far(rstd, want[0])
            yield from compare(f"{name} saved", (saved, saved_scale), want[2:], ("x", "scale"))
            y = rms_norm.rms_norm.reference(NormWithRstd(x, weight, rstd, offset, out))
            yield from compare_cast(name, layouts, y, cast)


def norm_backward(x, offset):
    weight = columns(x.shape[1])
    generator = torch.Generator().manual_seed(2)
    grad = spread(*x.shape, generator).to(x.dtype).as_strided(x.shape, x.contiguous().stride())
    grad = grad.t().contiguous().t()
    rstd, _, saved, scale = rms_norm.rms_norm_statistics.reference(
        NormInputs(x, weight, EPS, offset, x.dtype), True
    )
    for what, inputs in (("plain", (x, None)), ("saved", (saved, scale))):
        for dx_dtype, weight_grad in ((torch.float32, True), (BF16, False)):
            arguments = NormBackwardInputs(
                grad, *inputs, weight, rstd, offset, dx_dtype, weight_grad
            )
            got = norm_kernels.rms_norm_backward(arguments)
            want = rms_norm.rms_norm_backward.reference(arguments)
            yield f"{what} dx", far(got[0], want[0])
            yield f"{what} dw", far(got[1], want[1])


def swiglu_forward(gate, smooth, more=False):
    up = gate.flip(0).as_strided(gate.shape, gate.flip(0).stride()) if gate.numel() else gate
    factor = columns(gate.shape[1]) if smooth else None
    h = swiglu_kernels.swiglu(gate, up, factor)
    yield "h", far(h, swiglu.swiglu.reference(gate, up, factor), 512)
    want = (*fused_quantize.save_input(gate), *fused_quantize.save_input(up), tensor_amax(h))
    parts = ("gate", "gate scale", "up", "up scale", "amax")
    yield from compare("save", swiglu_kernels.swiglu_save(gate, up, factor), want, parts)
    *nothing, amax = swiglu_kernels.swiglu_save(gate, up, factor, False)
    yield from compare("save=False", [amax], [want[4]], ("amax",))
    yield "nothing saved", sum(t is not None for t in nothing)
    found = FOUND + (MORE_FOUND if more else ())
    every = [(*cast, True) for cast in casts(want[4], more, found)]
    if more:  # fused and not
        some = ("tensorwise", "rowwise")
        every += [(*cast, False) for cast in casts(want[4], True, found) if cast[1][1] in some]
    for name, cast, save in every:
        made = swiglu_kernels.swiglu_quantize(gate, up, factor, cast, save)
        saved = (*fused_quantize.save_input(gate, save), *fused_quantize.save_input(up, save))
        yield from compare(f"{name} {save=}", made[4:], saved, SAVED_PARTS)
        yield from compare_cast(f"{name} {save=}", made[:4], h, cast)


def swiglu_backward(gate, smooth, more=False):
    up = gate.flip(1) if gate.numel() else gate
    generator = torch.Generator().manual_seed(3)
    grad = spread(*gate.shape, generator).to(gate.dtype)
    factor = columns(gate.shape[1]) if smooth else None
    gate_q, gate_s = fused_quantize.save_input(gate)
    up_q, up_s = fused_quantize.save_input(up)
    operands = {"saved": (gate_q, gate_s, up_q, up_s)}
    if more:
        operands |= {"plain": (gate, None, up, None), "one saved": (gate_q, gate_s, up, None)}
    for what, inputs in operands.items():
        arguments = BackwardInputs(grad, *inputs, factor, gate.dtype)
        gradients = backward_kernels.swiglu_backward(arguments)
        exact = backward.swiglu_backward.reference(arguments)
        for name, d, want in zip(("dgate", "dup"), gradients, exact, strict=True):
            yield f"{what} {name}", far(d, want, 512)
        amax = torch.stack([tensor_amax(d) for d in gradients])
        yield f"{what} amax", differs(backward_kernels.swiglu_backward_amax(arguments), amax)
        every = more and what == "saved"  # what is read and how it is cast are two things
        for name, cast in casts(amax, every):
            of_up = () if cast.scale is None else (torch.tensor(0.05), torch.tensor(0.0))
            if cast.scale is not None and cast.amax is None:
                of_up = of_up[0], None
            made = backward_kernels.swiglu_backward_quantize(arguments, cast, *of_up)
            for i, (d, one) in enumerate(zip(gradients, cast.of_gradients(*of_up), strict=True)):
                yield from compare_cast(f"{what} {name} {i}", made[4 * i : 4 * i + 4], d, one)


def gate_up_backward(x, gate_first, more=False):
    """Both gradients in one matrix: those of `swiglu_backward` side by side, and their cast."""
    generator = torch.Generator().manual_seed(3)
    grad = spread(*x.shape, generator).to(x.dtype)
    both = torch.cat([x, x.flip(1)], 1) if x.numel() else torch.cat([x, x], 1)
    gate, up = backward.halves(both, gate_first)
    gate_q, gate_s = fused_quantize.save_input(gate)
    up_q, up_s = fused_quantize.save_input(up)
    operands = {"saved": (gate_q, gate_s, up_q, up_s)}
    if more:
        operands["plain"] = (gate, None, up, None)
    for what, inputs in operands.items():
        arguments = BackwardInputs(grad, *inputs, columns(x.shape[1]), x.dtype)
        dgate, dup = backward_kernels.swiglu_backward(arguments)
        want = torch.cat([dgate, dup] if gate_first else [dup, dgate], 1)
        by_kernel = backward_kernels.gate_up_backward(arguments, gate_first)
        yield f"{what} gradient", differs(by_kernel, want)
        amax = tensor_amax(want)
        yield f"{what} amax", differs(backward_kernels.gate_up_backward_amax(arguments), amax)
        every = more and what == "saved"
        for name, cast in casts(amax, every):
            by_kernel = backward_kernels.gate_up_backward_quantize(arguments, gate_first, cast)
            yield from compare_cast(f"{what} {name}", by_kernel, want, cast)


def smoothing(gate, more):
    """The amaxes of channels, the factors that they give, and casts of what has been smoothed."""
    up = gate.flip(0).as_strided(gate.shape, gate.flip(0).stride()) if gate.numel() else gate
    yield "columns", differs(smooth_kernels.column_amax(gate), smooth.column_amax.reference(gate))
    amax = smooth.column_amax.reference(swiglu_kernels.swiglu(gate, up, None))
    for save in (True, False):
        saved = (*fused_quantize.save_input(gate, save), *fused_quantize.save_input(up, save))
        made = smooth_kernels.swiglu_save_columns(gate, up, save)
        yield from compare(f"{save=}", made, (*saved, amax), (*SAVED_PARTS, "amax"))
    factors = smooth.smooth_factors.reference(amax)
    made = smooth_kernels.smooth_factors(amax)
    yield from compare("factors", made, factors, ("s", "1 / s", "smoothed"))
    times = (gate.float() * factors[0]).contiguous()
    for name, cast in casts(tensor_amax(times), more):
        made = smooth_kernels.quantize_columns(gate, factors[0], cast)
        yield from compare_cast(name, made, times, cast)


def results():
    for name, x in matrices():
        more = name == "tails"
        if name in SMOOTHED:
            yield f"smooth, {name}", named(smoothing(x, more))
        yield f"norm, {name}", named(norm_statistics(x, 1.0))
        yield f"norm casts, {name}", named(norm_casts(x, 1.0, more))
        yield f"swiglu, {name}", named(swiglu_forward(x, True, more or name == "few rows"))
        yield f"swiglu backward, {name}", named(swiglu_backward(x, True, more))
        yield f"gate_up backward, {name}", named(gate_up_backward(x, True))
        if more:
            yield "norm without offset", named(norm_statistics(x, 0.0))
            yield "norm casts without offset", named(norm_casts(x, 0.0))
            yield "swiglu, not smooth", named(swiglu_forward(x, False))
            yield "swiglu backward, not smooth", named(swiglu_backward(x, False))
        yield f"norm backward, {name}", named(norm_backward(x, 1.0))
    yield "norm once, two launches", named(norm_once(dict(matrices())["tails"], 1.0, True))
    norm_kernels.MULTIPROCESSORS = 0  # bands for any number of rows
    for name, x in matrices():
        yield f"norm once, {name}", named(norm_once(x, 1.0, name in ("tails", "few rows")))
    generator = torch.Generator().manual_seed(4)
    x = spread(144, 256, generator).bfloat16()
    yield "gate_up backward, whole tiles", named(gate_up_backward(x, True, True))
    yield "gate_up backward, up first", named(gate_up_backward(x, False))
    for cols in (4112, 16500):
        x = spread(3, cols, generator).bfloat16()
        yield f"norm, {cols} columns", named(norm_statistics(x, 0.0))
    for rows, cols in ((9, 8208), (1060, 16), (5, 2100)):
        x = spread(rows, cols, generator)
        yield f"norm backward, {rows} x {cols}", named(norm_backward(x, 0.0))


np.seterr(all="ignore")
json.dump(dict(results()), sys.stdout)
