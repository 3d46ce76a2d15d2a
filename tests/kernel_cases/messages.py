"""Cases of 8-bit gradients and messages between ranks: bytes equal to the reference's.

`parts` is `torch_fp8.ops.grad_codec` and `wire` is `torch_fp8.ops.messages`, or what stands for
them; the reference is always theirs, on the CPU.
"""

from typing import Any

import torch
from torch import Tensor

import torch_fp8.ops.grad_codec
import torch_fp8.ops.messages
from tests.internals import random_words, stream_keys
from tests.kernel_cases.comparison import close, require, same_values
from tests.rows_of_messages import pieces, unpack
from torch_fp8.ops.messages import Layout

SHAPES = ((1000, 1024), (5, 48), (36, 33), (3, 7), (2, 70000), (17, 4304), (0, 64), (1, 1))
DTYPES = (torch.bfloat16, torch.float32)
LAYOUTS = ((Layout(5000, 77), 4 * 5000 * 32), (Layout(70), 4 * 70 * 32 - 33), (Layout(0, 9), 0))
"""Layouts of messages, each with the number of values that four messages share."""
KEYS = {"nearest": None, "stochastic": stream_keys(1)}
_SCALE_NAN = 255


def check_gradient(
    parts: Any, device: str, shape: tuple[int, int], dtype: torch.dtype, exponent: int = 0
) -> None:
    """Check encoding, adding and decoding, with Inf and NaN in between."""
    reference = torch_fp8.ops.grad_codec
    generator = torch.Generator().manual_seed(0)
    want: Any = None
    got: Any = None
    what = f"gradient of {shape} {dtype}, 2^{exponent}"
    for i in range(4):
        x = (torch.randn(shape, generator=generator) * 2.0**exponent).to(dtype)
        if x.numel():
            x[0, -1] = (0.0, float("nan"), 1.0, float("inf"))[i]
        keys = stream_keys(i)
        if i % 2:
            reference.accumulate_gradient(want, x, keys)
            parts.accumulate_gradient(got, x.to(device), keys)
        else:
            want = reference.quantize_gradient(x, keys)
            got = parts.quantize_gradient(x.to(device), keys)
        same_values(got.scale, want.scale, f"{what}: scale")
        same_values(got.multiplier, want.multiplier, f"{what}: multiplier")
        free = (want.scale == _SCALE_NAN).repeat_interleave(32, 1)[:, : shape[1]]
        require(((got.qdata.cpu() == want.qdata) | free).all(), f"{what}: codes differ")
        for multiplier in (1.0, 0.37):
            want.multiplier.fill_(multiplier)
            got.multiplier.fill_(multiplier)
            decoded = parts.decode_gradient(got, dtype)
            close(decoded, reference.decode_gradient(want, dtype), 0.0, f"{what}: decoded")


def check_rounding(parts: Any, wire: Any, device: str) -> None:
    """Check values that are rounded up by half a random step.

    Without the half bit below the 16 random ones, or with the words of other elements, they are
    rounded down: what random values do not tell in 2^16 draws.
    """
    rows, layout, keys = 140, Layout(140), (1, 2)
    words = random_words(torch.arange(rows * 32, dtype=torch.int32), keys) & 0xFFFF
    below = (1 << 20) - (words << 4) - 4  # of the spacing of three mantissa bits
    x = (torch.tensor(2.5).view(torch.int32) + below).view(torch.float32).view(rows, 32)
    x[:, 0] = 100.0  # so that the scale is one
    want = torch_fp8.ops.grad_codec.quantize_gradient(x, keys)
    require((torch_fp8.ops.grad_codec.decode_gradient(want, x.dtype) >= x).all(), "rounded down")
    same_values(parts.quantize_gradient(x.to(device), keys).qdata, want.qdata, "rounded gradient")
    messages, reference = pieces(x), torch_fp8.ops.messages
    rounded = reference.reduce_and_repack(messages, layout, keys=keys)
    require((unpack(rounded, layout, x.dtype)[0].view_as(x) >= x).all(), "messages rounded down")
    got = wire.reduce_and_repack(messages.to(device), layout, keys=keys)
    _same_messages(got, rounded, layout, "rounded messages")


def check_messages(
    wire: Any,
    device: str,
    layout: Layout,
    numel: int,
    dtype: torch.dtype,
    exponent: int,
    keys: tuple[int, int] | None,
) -> None:
    reference = torch_fp8.ops.messages
    what = f"messages of {layout}, {dtype}, 2^{exponent}"
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(numel, generator=generator) * 2.0**exponent).to(dtype)
    plain = torch.randn(4 * layout.num_plain, generator=generator)
    x[:2] = torch.tensor([float("nan"), 0.0])[:numel]
    want = reference.pack_flat(x, plain, layout, 4)
    got = wire.pack_flat(x.to(device), plain.to(device), layout, 4)
    _same_messages(got, want, layout, f"packed {what}")
    _same_messages(
        wire.reduce_and_repack(want.to(device), layout, 1 / 3, keys=keys),
        reference.reduce_and_repack(want, layout, 1 / 3, keys=keys),
        layout,
        f"combined {what}",
    )
    results = []
    for codec, messages in ((reference, want), (wire, want.to(device))):
        out = x.new_empty(layout.num_values, device=messages.device)
        out_plain = x.new_empty(layout.num_plain, device=messages.device)
        codec.unpack_sum(messages, layout, out, out_plain, 1 / 3)
        results.append([out, out_plain, *unpack(messages, layout, dtype, codec)])
    for expected, made in zip(*results, strict=True):
        close(made, expected, 0.0, f"summed {what}")


def _same_messages(got: Tensor, want: Tensor, layout: Layout, what: str) -> None:
    got = got.cpu()
    require(torch.equal(layout.scales(got), layout.scales(want)), f"{what}: scales differ")
    free = (layout.scales(want) == _SCALE_NAN).repeat_interleave(32, 1)
    same = (layout.codes(got) == layout.codes(want)) | free
    require(same.all(), f"{what}: codes differ")
    if layout.num_plain:
        require(torch.equal(layout.plain(got), layout.plain(want)), f"{what}: plain values differ")
