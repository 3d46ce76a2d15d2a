"""Launches of every variant in the compile tests, with few rows and with values.

The tests' own functions launch, because they make every choice. There are few rows, which end
within a tile to test tails; the columns, which determine variants, are as many as in the tests.
Choices that depend on the size of a card or on many rows are set accordingly.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import torch_fp8.ops.messages
from tests.internals import CastOptions
from tests.internals import kernels_messages as wire
from tests.internals import kernels_quantize as quantize
from tests.internals import kernels_rms_norm as rms_norm
from tests.kernel_cases.comparison import same_bits
from tests.rows_of_messages import unpack
from tests.torch_fp8.kernels import test_compiled, test_producers_compiled
from torch_fp8.kernels.cast_launch import cdiv
from torch_fp8.ops.messages import Layout
from torch_fp8.ops.quantize import save_input

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ROWS = 144
"""A tile of 128 and a part of one, a multiple of 16."""
SHAPES = {
    **dict.fromkeys(("bf16", "fp16", "fp32"), (128, 4096)),
    "bf16 odd rows": (153, 512),
    "bf16 odd": (153, 515),
    "bf16 long rows": (16, 32768),
    "bf16 one element": (1, 1),
    "bf16 14336": (32, 14336),
    "bf16 no unit stride": (ROWS, 8192),
}
ODD_SHAPES = {
    "odd": (153, 515),
    "transposed": (8192, ROWS),
    "no unit stride": (ROWS, 8192),
    "short rows": (ROWS, 48),
    "8192 columns": (16, 8192),
    "14336 columns": (16, 14336),
    "long rows": (16, 32768),
    "one element": (1, 1),
}
PROGRAM_ROWS = {"norm": ROWS, "narrow norm": 272, "SwiGLU": ROWS, "plain": ROWS}


def values(*shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what `torch.empty` would allocate, with values: an amax of one is a bound of all.

    Vectors are positive, as weights, factors and amaxes of the past are.
    """
    shape = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
    generator = torch.Generator().manual_seed(hash((shape, dtype.itemsize)) % 2**31)
    if len(shape) == 1:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)
    x = (torch.randn(shape, generator=generator) / 8).clamp(-0.4, 0.4)
    return (x * 2.0 ** torch.randint(-6, 1, (shape[0], 1), generator=generator)).to(dtype)


def _input(name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    x = values(*shape, dtype=dtype)
    if "no unit stride" in name:
        return x[:, ::2]
    return x.t() if name == "transposed" else x


@contextlib.contextmanager
def few_rows() -> Iterator[None]:
    """Let the compile tests' functions launch with few rows within."""
    whole = dict(test_compiled.INPUTS)
    inputs = {name: _input(name, SHAPES[name], x.dtype) for name, x in whole.items()}
    odd = {name: _input(name, shape, BF16) for name, shape in ODD_SHAPES.items()}
    rows = {inputs[name].data_ptr(): x.shape[0] for name, x in whole.items()}
    partial_amax, column_amaxes = quantize.partial_amaxes, quantize.partial_column_amaxes

    def as_many(x: Tensor, partial: Tensor, count: int) -> Tensor:
        """Repeat partial maxima, as many as there are of all rows."""
        if x.data_ptr() not in rows or len(partial) >= count:
            return partial
        return torch.cat([partial] * cdiv(count, len(partial)))[:count].contiguous()

    def of_all(x: Tensor) -> Tensor:
        tiles = cdiv(rows.get(x.data_ptr(), 1), quantize.AMAX_TILE.rows) * cdiv(x.shape[1], 128)
        return as_many(x, partial_amax(x), min(tiles, quantize.AMAX_PROGRAMS))

    def of_columns(x: Tensor, *sums: Any) -> Tensor:
        blocks, row_blocks = cdiv(x.shape[1], 128), cdiv(rows.get(x.data_ptr(), 1), 128)
        slabs = min(cdiv(quantize.COLUMN_PROGRAMS, blocks), quantize.MAX_SLABS, row_blocks)
        return as_many(x, column_amaxes(x, *sums), slabs)

    with contextlib.ExitStack() as stack:
        for owner, name, stub in (
            (test_compiled, "INPUTS", inputs),
            (test_compiled, "empty", values),
            (test_producers_compiled, "ODD", odd),
            (test_producers_compiled, "ROWS", PROGRAM_ROWS),
            (test_producers_compiled, "empty", values),
            (test_producers_compiled, "saved", save_input),
            (quantize, "partial_amaxes", of_all),
            (quantize, "partial_column_amaxes", of_columns),
            (rms_norm, "MULTIPROCESSORS", 1),
            (rms_norm, "BACKWARD_SLABS", 7),
        ):
            stack.enter_context(mock.patch.object(owner, name, stub))
        yield


def launching() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield names and functions that launch, to be called `few_rows`."""
    for name in test_compiled.INPUTS:
        yield f"casts, {name}", partial(test_compiled.launch_everything, name)
    for size in (4096, 515):
        yield f"sums, {size}", partial(test_compiled.launch_sums, size)
    producers = test_producers_compiled
    for dtype in (BF16, torch.float32):
        yield f"whole tiles, {dtype}", partial(test_compiled.launch_whole_tiles, dtype)
        yield f"whole producers, {dtype}", partial(producers.launch_whole_tiles, dtype)
    for name, dtype in producers.DTYPES.items():
        more = int("odd" in name)
        yield f"norm casts, {name}", partial(producers.launch_norm_casts, dtype, more)
        yield f"norms of sums, {name}", partial(producers.launch_norms_of_sums, dtype)
        yield f"SwiGLU casts, {name}", partial(producers.launch_swiglu_casts, dtype, more)
    for name in (*producers.DTYPES, *producers.ODD):
        yield f"norms, {name}", partial(_of_input, producers.launch_norms, name)
        yield f"SwiGLU, {name}", partial(_of_input, producers.launch_swiglu, name)
    yield "groups of whole tiles of rows, odd columns", _odd_columns
    yield "smoothing, bf16", partial(_of_input, producers.launch_smoothing, "bf16")


def _odd_columns() -> None:
    """Cast each layout alone of rows that need no padding."""
    for row, col in ((True, False), (False, True)):
        options = CastOptions(E4M3, "block_1x128", False, row, col)
        quantize.quantize_2d(values(128, 515, dtype=BF16), options)


def unaligned_messages() -> None:
    """Unpack into memory that begins or ends within 16 bytes, and compare with whole memory."""
    layout, values_of = Layout(100, 9), 4 * 100 * 32
    flat, plain = values(values_of).to(BF16), values(4 * 9)
    packed = torch_fp8.ops.messages.pack_flat(flat, plain, layout, 4)
    for less in (0, 7):
        out = torch.zeros(values_of - less, dtype=BF16)
        wire.unpack(packed, layout, out)
        want = unpack(packed, layout, BF16)[0].reshape(-1)
        same_bits(out, want[: values_of - less], "values at odd addresses")
    sums = []
    for first in (0, 1):
        out = torch.zeros(100 * 32 + 1, dtype=BF16)
        wire.unpack_sum(packed, layout, out[first:][: 100 * 32], 0.25)
        sums.append(out[first:][: 100 * 32])
    same_bits(*sums, "sums at odd addresses")


def _of_input(function: Callable[[Tensor], None], name: str) -> None:
    function(test_producers_compiled.input_of(name))
