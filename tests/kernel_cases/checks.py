"""A few of the cases of the GPU tests, one function for each family of kernels.

A check is called with a device and with what stands for the kernels; a test plants faults in it.
Each combination of formats, layouts and divisibility is a compilation, about a second: that is why
there are few of them.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

import torch_fp8.ops.grad_codec
import torch_fp8.ops.messages
from tests.kernel_cases import casts, messages, optimizer, played, producers
from torch_fp8.quantization.recipe import Granularity

ODD, EVEN, FEW = (37, 131), (130, 272), (17, 272)
SHAPES = (ODD, EVEN, FEW)
TWO_FORMATS = ((torch.float8_e4m3fn, False), (torch.float8_e5m2, False))
CAST_KINDS = ("row spread", "boundaries", "zeros", "nan")
PRODUCER_SHAPES = ((48, 272), ODD)
OPTIMIZER_SHAPES = ((64, 272), (5, 48), (36, 33), (0, 64), (1, 1))


def cast(device: str, granularity: str, kernel: casts.CastKernel | None = None) -> str:
    """Check casts to both formats and layouts."""
    for kind in CAST_KINDS:
        casts.check_cast(kernel or casts.kernel(), device, granularity, kind, SHAPES, TWO_FORMATS)
    return "both formats and layouts, bit for bit"


def known_scale(device: str, kernel: casts.CastKernel | None = None) -> str:
    """Check casts with a scale, also beside a slot, or an amax that is known."""
    for kind in CAST_KINDS:
        casts.check_known_scale(kernel or casts.kernel(), device, kind, SHAPES)
    return "bit for bit"


def strides(device: str, kernel: casts.CastKernel | None = None) -> str:
    """Check casts of matrices that are not contiguous."""
    for granularity in ("tensorwise", "block_1x128"):
        casts.check_strides(kernel or casts.kernel(), device, granularity)
    return "transposed, sliced and expanded, bit for bit"


def transpose(device: str, kernel: casts.CastKernel | None = None) -> str:
    """Check that bytes are transposed."""
    casts.check_transpose(kernel or casts.transpose_kernel(), device)
    return "with zeros behind, bit for bit"


def bias_gradient(device: str) -> str:
    """Check casts that add up rows on their way."""
    granularities: tuple[Granularity, ...] = ("tensorwise", "rowwise", "block_1x128")
    for granularity in granularities:
        casts.check_sums(device, granularity)
    return "sums in float32, the same each time"


def norm(device: str, ops: Any = producers.OPS) -> str:
    """Check RMSNorm with its casts."""
    for shape, kind in itertools.product(PRODUCER_SHAPES, ("gaussian", "nan")):
        producers.check_norm(ops, device, shape, kind, few=True)
    for granularity in producers.FEW_GRANULARITIES:
        producers.check_norm_once(ops, device, (64, 512), granularity)
    for shape in (FEW, EVEN):
        producers.check_norm_once(ops, device, shape, "tensorwise", finds_amax=True)
    return "casts bit for bit"


def norm_backward(device: str, ops: Any = producers.OPS) -> str:
    """Check RMSNorm's gradients, from what it saved in FP8 and in BF16."""
    for shape, saved in itertools.product(PRODUCER_SHAPES, (False, True)):
        producers.check_norm_backward(ops, device, shape, saved)
    return "within a neighbour, the same each time"


def swiglu(device: str, ops: Any = producers.OPS) -> str:
    """Check SwiGLU with its casts."""
    for shape in (*PRODUCER_SHAPES, FEW):
        for smooth, kind in ((False, "gaussian"), (True, "nan")):
            producers.check_swiglu(ops, device, shape, kind, smooth, few=True)
    return "within a neighbour, casts bit for bit"


def smoothing(device: str, ops: Any = producers.OPS) -> str:
    """Check the scales per channel of Smooth-SwiGLU."""
    for shape, kind in itertools.product(PRODUCER_SHAPES, ("gaussian", "nan")):
        producers.check_smoothing(ops, device, shape, kind)
    return "bit for bit"


def swiglu_backward(device: str, ops: Any = producers.OPS) -> str:
    """Check the gradients of gate and up with their casts."""
    for shape, both in itertools.product(PRODUCER_SHAPES, (False, True)):
        producers.check_swiglu_backward(ops, device, shape, smooth=both, saved=both, few=True)
    return "within a neighbour, casts bit for bit"


def gate_up(device: str, ops: Any = producers.OPS) -> str:
    """Check the gradient of gate and up where they are one layer's output."""
    for shape in PRODUCER_SHAPES:
        producers.check_gate_up(ops, device, shape, True, few=True)
    return "as two, casts bit for bit"


def step(device: str, weight: str, kernel: optimizer.Step | None = None) -> str:
    """Check AdamW with one kind of weight and every kind of gradient."""
    for grad in optimizer.GRADS:
        optimizer.check_steps(
            kernel or optimizer.kernel(), device, weight, grad, shapes=OPTIMIZER_SHAPES
        )
    return f"three steps, gradients {', '.join(optimizer.GRADS)}, bit for bit"


def payload(device: str, kernel: optimizer.Step | None = None) -> str:
    """Check AdamW that writes the FP8 payload of the weight."""
    granularities: tuple[Literal["tensorwise", "block_128x128"], ...]
    granularities = ("tensorwise", "block_128x128")
    for granularity in granularities:
        for wrong in (None, 0.5):
            optimizer.check_payload(
                kernel or optimizer.kernel(),
                device,
                "bf16 with 8 bits",
                granularity,
                transposed=True,
                wrong=wrong,
                shapes=((144, 160), (16, 32)),
            )
    return "payload and transpose, bit for bit"


def update_size(device: str, kernel: Callable[..., Any] | None = None) -> str:
    """Check the size of an update, for StableAdamW."""
    if kernel is None:
        from torch_fp8.kernels.adamw import update_rms as kernel
    assert kernel is not None
    for grad in optimizer.GRADS:
        optimizer.check_update_rms(kernel, device, grad, 0.1, OPTIMIZER_SHAPES)
    return "within 1e-5, the same each time"


def gradient(device: str, parts: Any = torch_fp8.ops.grad_codec) -> str:
    """Check 8-bit gradients: encoding, adding, decoding."""
    for shape in ((100, 128), (36, 33), (0, 64), (1, 1)):
        for dtype in messages.DTYPES:
            messages.check_gradient(parts, device, shape, dtype)
    return "bit for bit"


def message(device: str, wire: Any = torch_fp8.ops.messages) -> str:
    """Check messages between ranks: packing, reducing, summing, unpacking."""
    for layout, numel in messages.LAYOUTS:
        for keys in messages.KEYS.values():
            messages.check_messages(wire, device, layout, numel, torch.bfloat16, 0, keys)
    return "bit for bit"


def played_calls(device: str, calls: Iterable[played.Call] | None = None) -> str:
    """Check that a launcher's recorded call is played as the launcher would do it."""
    for call in played.one_of_each(played.calls(*EVEN, device) if calls is None else calls):
        played.check_played(call)
    return "what the launcher makes, bit for bit"
