"""Functions of the device code, compiled and emulated, with the errors that a card may have."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.emulator.driver import emulated
from tests.internals import (
    GRADIENT,
    MOMENT1,
    MOMENT2,
    BlockScaled,
    decode,
    encode,
    fast_math,
    fp8_cast,
)
from tests.internals import kernels_block_scaled as block_scaled

pytestmark = pytest.mark.long
CONSTANTS = {"MOMENT1": MOMENT1, "MOMENT2": MOMENT2, "GRADIENT": GRADIENT}
"""Names of formats in `torch_fp8.kernels.block_scaled`, and the formats."""
ROUNDED = {"enable_fp_fusion": False}
"""Products are rounded before they are added, as in the optimizer's step."""
EVERY_FORMAT = pytest.mark.parametrize("constant", CONSTANTS)


@pytest.fixture(autouse=True, params=[1, 2], ids="errors{}".format)
def _card(request):
    with emulated(error_seed=request.param):
        yield


@triton.jit
def divide_kernel(x_ptr, scale_ptr, r_ptr, y_ptr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    r, s = fp8_cast.reciprocal(tl.load(scale_ptr + i), False)
    tl.store(r_ptr + i, r)
    tl.store(y_ptr + i, fp8_cast.divide(tl.load(x_ptr + i), r, s, False))


def test_quotients_of_the_hardest_mantissas_are_rounded_once():
    size = 2**15
    scale = (torch.arange(2**24 - size, 2**24) * 2.0**-23).float()
    boundaries = torch.tensor([1.0, 1.0625, 1.3125, 1.375, 1.5, 1.6875, 1.9375])
    x = boundaries.repeat(-(-size // 7))[:size] * scale
    x = x + (torch.arange(size) % 5 - 2) * 2.0**-23
    x[-1] = 1.0  # over 2 - 2^-23: the one quotient known to need the second correction
    r, y = torch.empty_like(x), torch.empty_like(x)
    divide_kernel[(size // 1024,)](x, scale, r, y)
    assert torch.equal(r, 1.0 / scale)
    assert torch.equal(y, x / scale)


@triton.jit
def encode_kernel(x_ptr, random_ptr, codes_ptr, scale_ptr, FORMAT: tl.constexpr):
    group = tl.program_id(0) * 64 + tl.arange(0, 64)
    position = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + position)
    scale = block_scaled.scale_of(x, FORMAT)
    offset = tl.load(random_ptr + position).to(tl.uint32, bitcast=True)
    tl.store(scale_ptr + group, scale)
    tl.store(codes_ptr + position, block_scaled.encode(x, scale, offset, FORMAT))


def around_codes(format):
    """(N, 31): every magnitude, what is next to it, and the middles between neighbours."""
    codes = torch.arange(format.max_code + 1).to(torch.uint8)[:, None]
    values = decode(BlockScaled(codes, torch.full_like(codes, 127)), format).flatten()
    middles = (values[1:] + values[:-1]) / 2
    values = torch.cat([values[1:], middles])
    values = torch.cat([values, values.nextafter(torch.zeros(())), values.nextafter(values * 2)])
    values = values[values <= format.max]
    rows = -(-len(values) // 31)
    return values.repeat(2)[: rows * 31].view(rows, 31)


@EVERY_FORMAT
def test_codes_are_the_references(constant):
    format, generator, shape = CONSTANTS[constant], torch.Generator().manual_seed(0), (512, 32)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-40, 3, shape, generator=generator)
    x *= 2.0 ** torch.randint(-100, 100, (len(x), 1), generator=generator)
    x[:32], x[32:64] = x[:32] * 2.0**-60, 0
    x[40, 3], x[41, 3], x[42, 3] = float("inf"), float("nan"), -0.0
    near = around_codes(format)
    x[64 : 64 + len(near)] = torch.cat([torch.full((len(near), 1), format.max), near], 1)
    x = x if format.signed else x.abs()
    below = 1 << (23 - format.mantissa_bits)
    random = torch.randint(0, below, shape, generator=generator).int()
    random[64:128:2], random[65:128:2] = 0, below - 1
    want = encode(x, format, random)
    codes, scale = torch.empty_like(want.qdata), torch.empty_like(want.scale)
    encode_kernel[(8,)](x, random, codes, scale, FORMAT=getattr(block_scaled, constant), **ROUNDED)
    assert torch.equal(scale, want.scale)
    assert ((codes == want.qdata) | (scale == 255)).all()


@triton.jit
def decode_kernel(codes_ptr, scale_ptr, x_ptr, FORMAT: tl.constexpr):
    group = tl.arange(0, 256)
    position = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = block_scaled.decode(tl.load(codes_ptr + position), tl.load(scale_ptr + group), FORMAT)
    tl.store(x_ptr + position, x)


@EVERY_FORMAT
def test_values_of_codes_are_the_references(constant):
    format, generator = CONSTANTS[constant], torch.Generator().manual_seed(0)
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[(codes & (0x7F if format.signed else 0xFF)) <= format.max_code]
    codes = codes[torch.randint(0, len(codes), (256, 32), generator=generator)]
    scale = torch.arange(256).to(torch.uint8)[:, None]
    want, got = decode(BlockScaled(codes, scale), format), torch.empty(256, 32)
    decode_kernel[(1,)](codes, scale, got, FORMAT=getattr(block_scaled, constant), **ROUNDED)
    assert ((got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())).all()


@triton.jit
def quotient_kernel(x_ptr, x_scale_ptr, y_ptr, y_scale_ptr, root_ptr, q_ptr, factor):
    group = tl.program_id(0) * 64 + tl.arange(0, 64)
    position = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x, y = tl.load(x_ptr + position), tl.load(y_ptr + position)
    root = fast_math.square_root(x, tl.load(x_scale_ptr + group), factor)
    tl.store(root_ptr + position, root)
    y_scale = tl.load(y_scale_ptr + group)
    tl.store(q_ptr + position, fast_math.scaled_quotient(y, y_scale, root + 1e-8, factor))


def test_roots_and_quotients_are_rounded_once_whatever_the_scale():
    """Down to 2^-100 of the group's largest."""
    generator, shape = torch.Generator().manual_seed(0), (1024, 32)
    x = torch.rand(shape, generator=generator) + 0.5
    x *= 2.0 ** torch.randint(-100, 1, shape, generator=generator)
    y = torch.randn(shape, generator=generator)
    y *= 2.0 ** torch.randint(-60, 1, shape, generator=generator)
    for matrix in (x, y):
        matrix *= 2.0 ** torch.randint(-24, 25, (shape[0], 1), generator=generator)
        matrix[:, 0] = 0
    factor = np.float32(1.7)
    root, got = torch.empty(shape), torch.empty(shape)
    scales = encode(x, MOMENT2).scale, encode(y, MOMENT1).scale
    quotient_kernel[(16,)](x, scales[0], y, scales[1], root, got, float(factor), **ROUNDED)
    want = np.sqrt(x.numpy()) * factor
    assert (root.numpy() == want).all()
    assert (got.numpy() == (y.numpy() / (want + np.float32(1e-8))) * factor).all()


@triton.jit
def reciprocal_kernel(x_ptr, y_ptr):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(y_ptr + at, fast_math.reciprocal(tl.load(x_ptr + at)))


def test_reciprocals_are_rounded_once():
    codes = torch.arange(1, 256, dtype=torch.uint8)[:, None]
    scales = [torch.full_like(codes, scale) for scale in (127, 128)]
    roots = [decode(BlockScaled(codes, s), MOMENT2).double().sqrt().float() for s in scales]
    numbers = (1 + torch.arange(32) / 32)[:, None]
    x = torch.cat([*roots, numbers, numbers.new_ones(98, 1)]).contiguous()
    got = torch.empty_like(x)
    reciprocal_kernel[(len(x) // 128,)](x, got, **ROUNDED)
    assert torch.equal(got, 1 / x)
