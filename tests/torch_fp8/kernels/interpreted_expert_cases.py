"""Runs the kernels of experts under Triton's CPU interpreter; prints what differs, as JSON.

Run by test_experts_interpreted.py in a process of its own. The interpreter's conversions to and
from FP8 and BF16 are replaced, as in interpreted_producer_cases.py; the reference takes the
interpreter's sigmoid, so that all bits are compared.
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
from tests.kernel_cases import experts
from tests.kernel_cases.comparison import Mismatch
from torch_fp8.kernels import expert_gate, moe_rows

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
GATES = (
    ("plain", False),
    ("plain", True),
    ("interleaved with limits", True),
    ("limits", False),
)
"""Forms of the gate, and whether there is a bias; a card runs all of them with and without."""


def exact_fma(self, x, y, z):
    with np.errstate(all="ignore"):
        value = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(value.astype(np.float32), z.dtype.scalar)


def torch_fp_to_fp(self, src, dst_type, rounding_mode):
    data = torch.from_numpy(np.ascontiguousarray(src.data))
    if src.dtype.scalar == tl.float8e4nv:
        data = data.view(E4M3).float()
    else:
        data = data.to(E4M3).view(torch.uint8)
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
interpreter.InterpreterBuilder.create_fp_to_fp = torch_fp_to_fp
interpreter.InterpreterBuilder.create_fp_trunc = torch_fp_trunc


def sigmoid(x):
    with np.errstate(over="ignore"):
        return torch.from_numpy(1 / (1 + np.exp(-x.contiguous().numpy()))).view(x.shape)


def cases():
    yield "rows", lambda: experts.check_rows(moe_rows, "cpu", (48, 131))
    for gathers, name in ((False, "rows transposed"), (True, "tokens transposed")):
        yield (
            name,
            lambda gathers=gathers: experts.check_transposition(moe_rows, "cpu", gathers, (131,)),
        )
    # Few tokens are a matter of the route, which all forms of the gate read alike.
    choices = ("random", "one token", "no token")
    for name, bias in GATES:
        yield (
            f"gate, {name}{', bias' * bias}",
            lambda name=name, bias=bias, choices=choices: experts.check_gate(
                expert_gate, "cpu", experts.FORMS[name], bias, BF16, (131,), sigmoid, choices
            ),
        )
        choices = ("experts without tokens",)


def results():
    for name, check in cases():
        try:
            check()
        except Mismatch as error:
            yield name, [str(error)]
        else:
            yield name, []


json.dump(dict(results()), sys.stdout)
