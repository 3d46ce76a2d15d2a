"""Runs the kernels of messages under Triton's CPU interpreter; prints what differs, as JSON.

Run by test_wire_interpreted.py in a process of its own, as interpreted_cases.py is.
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
from tests.rows_of_messages import pack, unpack
from torch_fp8.kernels import messages as kernels
from torch_fp8.ops import messages as wire
from torch_fp8.ops.messages import Layout
from torch_fp8.quantization.stochastic_rounding import stream_keys

CASES = {
    "several programs": (Layout(130), 2 * 130 * 32),
    "end within a program": (Layout(70), 2 * 70 * 32 - 1024),
    "end within a group": (Layout(70), 2 * 70 * 32 - 16),
    "odd end": (Layout(70), 2 * 70 * 32 - 33),
    "an empty message": (Layout(5), 100),
    "one group": (Layout(1), 64),
    "nothing": (Layout(2), 0),
}
KEYS = stream_keys(3)


def torch_fp_trunc(self, src, dst_type):
    """To nearest even; the interpreter cuts the lower bits off."""
    data = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16)
    return interpreter.TensorHandle(data.numpy().view(np.uint16), dst_type.scalar)


mend()
interpreter.InterpreterBuilder.create_fp_trunc = torch_fp_trunc


def values_of(numel, dtype, seed=0):
    """Groups of every size, denormals, ties, an Inf and a NaN where there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    exponent = torch.randint(-8, 9, (-(-numel // 32),), generator=generator)
    x *= (2.0**exponent).repeat_interleave(32)[:numel]
    if numel > 1000:
        x[70], x[999], x[128:160] = float("inf"), float("nan"), 0
        x[160:192] = torch.arange(32) * 0.5  # ties
        # The interpreter takes a BF16 denormal for zero.
        x[192:224] *= 2.0 ** (-140 if dtype == torch.float32 else -110)
    return x.to(dtype)


def messages_differ(got, want, layout):
    """In codes and scales; codes of groups that read NaN are free."""
    free = (layout.scales(want) == 255).repeat_interleave(32, 1)
    codes = int(((layout.codes(got) != layout.codes(want)) & ~free).sum())
    scales = int((layout.scales(got) != layout.scales(want)).sum())
    return f"{codes} codes, {scales} scales" if codes or scales else ""


def values_differ(got, want):
    same = (got == want) | (got.isnan() & want.isnan())
    return "" if bool(same.all()) else f"{int((~same).sum())} values"


def differences(layout, numel, dtype):
    x = values_of(numel, dtype)
    for keys in (None, KEYS):
        want = wire.pack_flat(x, None, layout, 2, keys=keys)
        got = torch.zeros_like(want)
        kernels.pack(x, layout, got, keys)
        yield messages_differ(got, want, layout)
        combined = wire.reduce_and_repack(want, layout, 1 / 3, keys=keys)
        got = torch.zeros_like(combined)
        kernels.reduce_and_repack(want, layout, got, 1 / 3, keys)
        yield messages_differ(got, combined, layout)
    got, expected = torch.full((2, numel), 7.0, dtype=dtype)
    wire.unpack_flat(want, layout, expected, None)
    kernels.unpack(want, layout, got)
    yield values_differ(got, expected)
    got, expected = torch.full((2, layout.num_values), 7.0, dtype=dtype)
    wire.unpack_sum(want, layout, expected, None, 1 / 3)
    kernels.unpack_sum(want, layout, got, 1 / 3)
    yield values_differ(got, expected)


def plain_differences():
    layout = Layout(3, 1500)
    messages = pack(values_of(3 * 96, torch.float32).view(3, 96), torch.randn(3, 1500))
    layout.plain(messages)[1, 7] = float("nan")
    for dtype in (torch.bfloat16, torch.float32):
        got, want = torch.empty(1500, dtype=dtype), torch.empty(1500, dtype=dtype)
        wire.unpack_sum(messages, layout, torch.empty(96), want, 1 / 3)
        kernels.sum_plain(layout.plain(messages), got, 1 / 3)
        yield values_differ(got, want)


def shifted_differences():
    """Buffers whose addresses are those of odd elements."""
    x, layout = values_of(4097, torch.float32)[1:], Layout(128)
    want = wire.pack_flat(x, None, layout, 1)
    got = torch.zeros_like(want)
    kernels.pack(x, layout, got, None)
    yield messages_differ(got, want, layout)
    out = torch.zeros(2, 4097)
    kernels.unpack(want, layout, out[0, 1:])
    wire.unpack_flat(want, layout, out[1, 1:].contiguous(), None)
    expected = unpack(want, layout, torch.float32)[0][0]
    yield values_differ(out[0, 1:], expected)


def rounded_up_differences():
    x, layout = just_rounded_up(1, 2 * 70 * 32, KEYS).view(-1), Layout(70)
    want = wire.pack_flat(x, None, layout, 2, keys=KEYS)
    got = torch.zeros_like(want)
    kernels.pack(x, layout, got, KEYS)
    yield messages_differ(got, want, layout)
    values = unpack(want, layout, torch.float32)[0].view(-1)
    yield "" if bool((values >= x).all()) else "not by the reference"


def results():
    for name, (layout, numel) in CASES.items():
        for dtype in (torch.bfloat16, torch.float32):
            failures = [text for text in differences(layout, numel, dtype) if text]
            yield f"{name}, {str(dtype).removeprefix('torch.')}", failures
    yield "plain values", [text for text in plain_differences() if text]
    yield "address of an odd element", [text for text in shifted_differences() if text]
    yield "just rounded up", [text for text in rounded_up_differences() if text]


json.dump(dict(results()), sys.stdout)
