"""Runs the optimizer's kernels under Triton's CPU interpreter; prints, as JSON, what differs how.

Run by test_adamw_interpreted.py in a process of its own, as interpreted_cases.py is. Four of the
interpreter's operations are replaced: its fused multiply-add rounds twice, its conversion to FP8 in
a way of its own, and the hardware's approximate reciprocal and root have errors, of which it has
none; they are given an ulp. All other arithmetic is integers or correctly rounded, so results are
compared bit for bit.
"""

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
from tests.kernel_cases.states import matrix_differences, moved, optimizer_matrix
from torch_fp8.kernels import adamw, block_scaled, fast_math
from torch_fp8.kernels.arguments import CastOptions, StepScalars, WeightPayload
from torch_fp8.kernels.block_scaled import decode, encode, scale_of
from torch_fp8.ops.adamw import adamw_step_reference, update_rms_reference
from torch_fp8.ops.quantize import quantize_layouts
from torch_fp8.quantization.block_scaled import BlockScaled
from torch_fp8.quantization.block_scaled import decode as decode_reference
from torch_fp8.quantization.block_scaled import encode as encode_reference
from torch_fp8.quantization.formats import E4M3, GRADIENT, MOMENT1, MOMENT2
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.stochastic_rounding import stream_keys

adamw.CHUNK = 32  # several chunks of small matrices

WEIGHTS = {
    "bf16 with 8 bits": (torch.bfloat16, 8),
    "bf16 alone": (torch.bfloat16, 0),
    "fp32": (torch.float32, 0),
}
GRADS = {"bf16": torch.bfloat16, "fp32": torch.float32, "8-bit": torch.uint8}
# Flat in several chunks, the last one partial; rows of one and a half groups; odd ones; one row;
# one that is shorter than a group; rows longer than a chunk; nothing.
SHAPES = ((75, 32), (5, 48), (36, 33), (1, 96), (3, 7), (2, 1040), (1, 1), (0, 64), (64, 0))
SCALARS = StepScalars(
    beta1_complement=1 - 0.9,
    beta2=0.999,
    beta2_complement=1 - 0.999,
    step_size=1e-3 / (1 - 0.9**3),
    inv_sqrt_correction=(1 - 0.999**3) ** -0.5,
    eps=1e-8,
    decay=1 - 1e-3 * 0.1,
    weight_decay=0.0,
    maximize=False,
    keys=stream_keys(1, 2, 3),
)


def with_error(value):
    """An ulp off, up or down."""
    towards = np.where(value.view(np.int32) % 2, np.float32(-np.inf), np.float32(np.inf))
    return np.nextafter(value, towards)


def exact_fma(self, x, y, z):
    with np.errstate(all="ignore"):
        value = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(value.astype(np.float32), z.dtype.scalar)


def approximate_root(self, x):
    with np.errstate(all="ignore"):
        value = (1 / np.sqrt(x.data.astype(np.float64))).astype(np.float32)
    return interpreter.TensorHandle(with_error(value), x.dtype.scalar)


def approximate_reciprocal(x):
    with np.errstate(all="ignore"):
        value = (1 / x.handle.data).astype(np.float32)
    return tl.core.tensor(interpreter.TensorHandle(with_error(value), tl.float32), x.type)


fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp


def torch_fp_to_fp(self, src, dst_type, rounding_mode):
    """To E4M3 as torch does; the interpreter's own rounds otherwise."""
    if dst_type.scalar != tl.float8e4nv:
        return fp_to_fp(self, src, dst_type, rounding_mode)
    data = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn)
    return interpreter.TensorHandle(data.view(torch.uint8).numpy(), dst_type.scalar)


mend()
interpreter.InterpreterBuilder.create_fma = exact_fma
interpreter.InterpreterBuilder.create_fp_to_fp = torch_fp_to_fp
interpreter.InterpreterBuilder.create_rsqrt = approximate_root
fast_math._approximate_reciprocal = approximate_reciprocal


def stepped(matrices, scalars, lr_multipliers=None):
    """What differs from the reference after a step on all of them."""
    want = [moved(matrix, "cpu") for matrix in matrices]
    adamw.adamw_step(list(zip(matrices, scalars, strict=True)), lr_multipliers)
    failures = []
    for i, (matrix, expected) in enumerate(zip(matrices, want, strict=True)):
        adamw_step_reference(expected, scalars[i], lr_multipliers and lr_multipliers[i])
        found = matrix_differences(matrix, expected)
        failures += [f"{tuple(matrix.weight.shape)}: {text}" for text in found]
    return failures


def default(*shape, **choices):
    return optimizer_matrix(*shape, torch.bfloat16, 8, torch.bfloat16, **choices)


def classes():
    """Every class; matrices of many shapes in one call, each with scalars of its own."""
    for (weight, kind), (grad, dtype) in ((w, g) for w in WEIGHTS.items() for g in GRADS.items()):
        matrices = [
            optimizer_matrix(*shape, *kind, dtype, seed=i) for i, shape in enumerate(SHAPES)
        ]
        scalars = [
            SCALARS._replace(keys=stream_keys(i), step_size=1e-3 * (i + 1), beta2=0.99 + i / 1000)
            for i in range(len(SHAPES))
        ]
        yield f"{weight}, gradient {grad}", stepped(matrices, scalars)


def amaxes():
    """Of the new weights, with and without in one call; raised from what was there; of a NaN."""
    kinds = [(torch.bfloat16, 8), (torch.bfloat16, 0), (torch.float32, 0)]
    matrices = [
        optimizer_matrix(*shape, *kind, torch.bfloat16, seed=i)._replace(
            amax=None if i % 3 == 2 else torch.tensor(0.0 if i % 3 else 0.3)
        )
        for i, (shape, kind) in enumerate((s, k) for s in SHAPES for k in kinds)
    ]
    matrices[0].weight[1, 3] = float("nan")
    yield "amax", stepped(matrices, [SCALARS] * len(matrices))


def with_payload(matrix, granularity, transposed, wrong):
    """The matrix, and the payload that it has before its step, some of the scales not its own."""
    spec = CastSpec(E4M3, granularity, power_of_two=True)
    row, col = quantize_layouts(
        matrix.weight, CastOptions.of(spec, rowwise=True, columnwise=transposed)
    )
    scale, scale_t = row.scale.clone(), None if col is None else col.scale.clone()
    if wrong:
        scale.view(-1)[::2] *= wrong
    blocks = granularity == "block_128x128"
    payload = WeightPayload(
        granularity,
        row.qdata.view(torch.uint8),
        scale,
        scale if blocks else torch.full((), -1.0),
        None if col is None else col.qdata.view(torch.uint8),
        scale_t if blocks else None,
    )
    return matrix._replace(payload=payload, amax=None if blocks else torch.zeros(()))


def payload_differences(matrix):
    """What differs from a cast of the weight as it is now."""
    payload = matrix.payload
    spec = CastSpec(E4M3, payload.granularity, power_of_two=True)
    row, col = quantize_layouts(matrix.weight, CastOptions.of(spec, rowwise=True, columnwise=True))
    pairs = [("payload", payload.qdata, row.qdata), ("scale", payload.new_scale, row.scale)]
    if payload.qdata_t is not None:
        pairs.append(("transposed payload", payload.qdata_t, col.qdata))
        if payload.scale_t is not None:
            pairs.append(("transposed scale", payload.scale_t, col.scale))
    return [name for name, got, want in pairs if not same(got, want)]


def same(got, want):
    """Bit for bit, NaN as NaN."""
    if got.dtype == torch.uint8:
        got, want = got.view(torch.float8_e4m3fn).float(), want.float()
    bits = got.view(torch.int32) == want.view(torch.int32)
    return bool((bits | (got.isnan() & want.isnan())).all())


# Whole squares take long here: with both layouts, one of two by two, edges only, and small ones.
TWO_BY_TWO, TWO_BY_ONE = (144, 160), (144, 32)
PAYLOADS = (
    (None, "bf16 with 8 bits", "bf16", None),
    ((16, 32), "bf16 with 8 bits", "8-bit", 0.5),
    ((32, 96), "bf16 alone", "bf16", 2.0),
    ((16, 160), "fp32", "fp32", float("nan")),
)


def payloads():
    """Scales that stay, grow, shrink, are NaN; edges of squares; both layouts or one."""
    for granularity in ("tensorwise", "block_128x128"):
        for transposed in (False, True):
            matrices = []
            for i, (shape, weight, grad, wrong) in enumerate(PAYLOADS):
                shape = shape or (TWO_BY_TWO if transposed else TWO_BY_ONE)
                matrix = optimizer_matrix(*shape, *WEIGHTS[weight], GRADS[grad], seed=i)
                matrices.append(with_payload(matrix, granularity, transposed, wrong))
            if transposed:
                matrices[0].weight[130, 3] = float("nan")
                matrices[1].weight.zero_()
            failures = stepped(matrices, [SCALARS] * len(matrices))
            for matrix in matrices:
                found = payload_differences(matrix)
                failures += [f"{tuple(matrix.weight.shape)}: {text}" for text in found]
            yield f"payload {granularity}{', transposed' if transposed else ''}", failures
    large = with_payload(default(32, 160), "tensorwise", False, None)
    large.grad[0, 0] = 1e6
    steps = SCALARS._replace(step_size=1e3)
    failures = stepped([large, default(9, 64)], [steps, SCALARS])
    yield "payload of a weight that doubles", failures + payload_differences(large)


def choices():
    coupled = SCALARS._replace(weight_decay=0.1, decay=1.0)
    yield (
        "coupled weight decay",
        stepped(
            [optimizer_matrix(9, 64, *kind, torch.float32) for kind in WEIGHTS.values()],
            [coupled] * len(WEIGHTS),
        ),
    )
    yield (
        "maximize",
        stepped(
            [optimizer_matrix(9, 64, torch.bfloat16, 8, dtype) for dtype in GRADS.values()],
            [SCALARS._replace(maximize=True)] * 3,
        ),
    )
    multipliers = [torch.tensor(0.37), None, torch.tensor(1.0)]
    matrices = [default(9, 64, seed=i) for i in range(3)]
    yield "multiplier of the learning rate", stepped(matrices, [SCALARS] * 3, multipliers)
    # Indices beyond 2^32, and shards that begin within a row.
    places = [(2**20 + 1, 0, 2**14), (3, 16, 4096), (70000, 2**16, 2**18)]
    shapes = (2, 2**14), (9, 48), (9, 33)
    matrices = [default(*shape, place=p) for shape, p in zip(shapes, places, strict=True)]
    yield "shards", stepped(matrices[1:], [SCALARS] * 2) + stepped(matrices[:1], [SCALARS])
    shifted = default(9, 64)
    shifted = shifted._replace(weight=torch.empty(577).bfloat16()[1:].view(9, 64).copy_(shifted[0]))
    yield "address of an odd element", stepped([shifted], [SCALARS])
    matrices = [default(9, 64, seed=1), optimizer_matrix(5, 33, torch.bfloat16, 0, torch.uint8)]
    failures = []
    for step in range(3):
        failures += stepped(matrices, [SCALARS._replace(keys=stream_keys(step))] * 2)
    yield "three steps", failures


def values():
    for name, exponent in (("tiny", -30), ("huge", 30)):
        yield name, stepped([default(9, 64, exponent=exponent)], [SCALARS])
    zeros = default(9, 64)
    for tensor in (zeros.grad, zeros.exp_avg.qdata, zeros.exp_avg_sq.qdata):
        tensor[:, 5:50] = 0
        tensor[4] = 0
    zeros.weight[:, :20] = 0
    yield "zeros", stepped([zeros], [SCALARS])
    # Of a group with an Inf the moments read NaN afterwards, so it does not matter what follows.
    nonfinite = default(9, 64)
    nonfinite.grad[1, 3], nonfinite.grad[5, 60] = float("nan"), float("inf")
    nonfinite.weight[2, 2], nonfinite.weight[3, 3] = float("inf"), float("nan")
    yield "Inf and NaN", stepped([nonfinite], [SCALARS])
    overflow = optimizer_matrix(1, 32, torch.bfloat16, 8, torch.float32)
    overflow.grad[0, 7] = 1e25
    adamw.adamw_step([(overflow, SCALARS)])
    bad = overflow.weight.isnan().nonzero().tolist()
    yield "g^2 overflows", [] if bad == [[0, 7]] else [f"NaN at {bad}"]


def rms():
    matrices = [
        optimizer_matrix(*shape, *kind, dtype, seed=i)
        for i, shape in enumerate(SHAPES)
        for kind in WEIGHTS.values()
        for dtype in (torch.bfloat16, torch.uint8)
    ]
    for name, scalars in (
        ("decoupled", SCALARS),
        ("coupled", SCALARS._replace(weight_decay=0.1, eps=0.1)),
    ):
        got = adamw.update_rms([(matrix, scalars) for matrix in matrices])
        want = torch.stack([update_rms_reference(matrix, scalars) for matrix in matrices])
        off = ((got - want).abs() / want.clamp(min=1e-6)).max().item()
        yield f"update RMS, {name}", [] if off < 1e-6 else [f"off by {off}"]


@triton.jit
def encode_kernel(x_ptr, random_ptr, codes_ptr, scale_ptr, FORMAT: tl.constexpr):
    group = tl.program_id(0) * 256 + tl.arange(0, 256)
    position = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + position)
    scale = scale_of(x, FORMAT)
    offset = tl.load(random_ptr + position).to(tl.uint32, bitcast=True)
    tl.store(scale_ptr + group, scale)
    tl.store(codes_ptr + position, encode(x, scale, offset, FORMAT))


@triton.jit
def decode_kernel(codes_ptr, scale_ptr, x_ptr, FORMAT: tl.constexpr):
    group = tl.arange(0, 2048)
    position = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = decode(tl.load(codes_ptr + position), tl.load(scale_ptr + group), FORMAT)
    tl.store(x_ptr + position, x)


def around_codes(format):
    """(512, 31): every magnitude, what is next to it, and the middles between neighbours."""
    codes = torch.arange(format.max_code + 1).to(torch.uint8)[:, None]
    ones = torch.full_like(codes, 127)
    values = decode_reference(BlockScaled(codes, ones), format).flatten()
    middles = (values[1:] + values[:-1]) / 2
    values = torch.cat([values[1:], middles])
    values = torch.cat([values, values.nextafter(torch.zeros(())), values.nextafter(values * 2)])
    values = values[values <= format.max]
    return values.repeat(-(-512 * 31 // len(values)))[: 512 * 31].view(512, 31)


def codec():
    generator = torch.Generator().manual_seed(0)
    for format in (MOMENT1, MOMENT2, GRADIENT):
        constant = getattr(
            block_scaled,
            {"e4m3": "MOMENT1", "tapered_unsigned": "MOMENT2", "tapered": "GRADIENT"}[format.name],
        )
        # Exponents from a group's largest down to far below the format's smallest.
        shape = (4096, 32)
        x = torch.randn(shape, generator=generator)
        x *= 2.0 ** torch.randint(-40, 3, shape, generator=generator)
        x *= 2.0 ** torch.randint(-100, 100, (4096, 1), generator=generator)
        x[:256] *= 2.0**-60  # denormal ones
        x[256:512] = 0
        x[300, 3], x[301, 3], x[302, 3] = float("inf"), float("nan"), -0.0
        x[512:1024, 0], x[512:1024, 1:] = format.max, around_codes(format)
        x = x.abs() if not format.signed else x
        below = 1 << (23 - format.mantissa_bits)
        random = torch.randint(0, below, shape, generator=generator).int()
        random[:8], random[8:16] = 0, below - 1
        random[512:768], random[768:1024] = 0, below - 1
        want = encode_reference(x, format, random)
        codes, scale = torch.empty_like(want.qdata), torch.empty_like(want.scale)
        encode_kernel[(16,)](x, random, codes, scale, FORMAT=constant)
        wrong = int((scale != want.scale).sum())
        wrong += int(((codes != want.qdata) & (scale != 255)).sum())
        yield f"encode {format.name}", [f"{wrong} differ"] if wrong else []

        codes = torch.arange(256).to(torch.uint8)
        codes = codes[(codes & (0x7F if format.signed else 0xFF)) <= format.max_code]
        codes = codes[torch.randint(0, len(codes), (2048, 32), generator=generator)]
        scale = (torch.arange(2048) % 256).to(torch.uint8)[:, None]
        want, got = decode_reference(BlockScaled(codes, scale), format), torch.empty(2048, 32)
        decode_kernel[(1,)](codes, scale, got, FORMAT=constant)
        same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
        yield f"decode {format.name}", [] if same.all() else [f"{int((~same).sum())} differ"]


@triton.jit
def quotient_kernel(x_ptr, x_scale_ptr, y_ptr, y_scale_ptr, root_ptr, q_ptr, factor):
    group = tl.program_id(0) * 512 + tl.arange(0, 512)
    position = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x, y = tl.load(x_ptr + position), tl.load(y_ptr + position)
    root = fast_math.square_root(x, tl.load(x_scale_ptr + group), factor)
    tl.store(root_ptr + position, root)
    tl.store(
        q_ptr + position,
        fast_math.scaled_quotient(y, tl.load(y_scale_ptr + group), root + 1e-8, factor),
    )


def quotients():
    """Correctly rounded, whatever the scale, and down to 2^-100 of the group's largest."""
    generator, shape = torch.Generator().manual_seed(0), (1 << 14, 32)
    x = torch.rand(shape, generator=generator) + 0.5
    x *= 2.0 ** torch.randint(-100, 1, shape, generator=generator)
    y = torch.randn(shape, generator=generator)
    y *= 2.0 ** torch.randint(-60, 1, shape, generator=generator)
    for matrix in (x, y):
        matrix *= 2.0 ** torch.randint(-24, 25, (shape[0], 1), generator=generator)
        matrix[:, 0] = 0
    factor = np.float32(1.7)
    root, got = torch.empty(shape), torch.empty(shape)
    scales = encode_reference(x, MOMENT2).scale, encode_reference(y, MOMENT1).scale
    quotient_kernel[(32,)](x, scales[0], y, scales[1], root, got, float(factor))
    want = np.sqrt(x.numpy()) * factor
    wrong = int((root.numpy() != want).sum())
    yield "square root", [f"{wrong} differ"] if wrong else []
    want = (y.numpy() / (want + np.float32(1e-8))) * factor
    wrong = int((got.numpy() != want).sum())
    yield "quotient", [f"{wrong} differ"] if wrong else []


@triton.jit
def reciprocal_kernel(x_ptr, y_ptr):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(y_ptr + at, fast_math.reciprocal(tl.load(x_ptr + at)))


def reciprocals():
    """Of every root of a second moment, in two neighbouring scales, and of numbers up to two."""
    codes = torch.arange(1, 256, dtype=torch.uint8)[:, None]
    scales = torch.tensor([[127], [128]], dtype=torch.uint8)
    second = [
        decode_reference(BlockScaled(codes, scale.expand(255, 1)), MOMENT2) for scale in scales
    ]
    numbers = (1 + torch.arange(32) / 32)[:, None]
    roots = [v.double().sqrt().float() for v in second]
    x = torch.cat([*roots, numbers, numbers.new_ones(98, 1)]).contiguous()
    got = torch.empty_like(x)
    reciprocal_kernel[(len(x) // 128,)](x, got)
    wrong = int((got != 1 / x).sum())
    yield "reciprocal", [f"{wrong} differ"] if wrong else []


def results():
    for cases in (
        classes,
        amaxes,
        payloads,
        choices,
        values,
        rms,
        codec,
        quotients,
        reciprocals,
    ):
        yield from cases()


json.dump(dict(results()), sys.stdout)
