"""The emulator's arithmetic and conversions, against torch and exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.emulator import arithmetic, conversions
from tests.emulator.approximate import Approximate
from tests.internals import E4M3, E5M2

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def floats(count=200_000, seed=0):
    """float32 of every kind: random bits, values of FP8's range, and halves between FP8 values."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    near = (random.normal(size=count) * 2.0 ** random.integers(-20, 18, count)).astype(np.float32)
    ties = (random.integers(0, 1 << 12, count, dtype=np.uint32) << np.uint32(19)).view(np.float32)
    return np.concatenate([bits, near, ties, np.float32([0, -0.0, np.inf, -np.inf, 448, 464, 480])])


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_equals_torch_and_saturates(format):
    x = floats()
    mine = getattr(conversions, f"{format.name}_of")(x).astype(np.uint8)
    clamped = torch.from_numpy(x).clamp(-format.max, format.max)
    theirs = clamped.to(format.dtype).view(torch.uint8).numpy()
    nan = np.isnan(x)
    assert (mine[~nan] == theirs[~nan]).all()
    assert (mine[nan] == 0x7F).all()


def nearest(exact):
    """Round a fraction to float32, to nearest even."""
    if exact == 0:
        return np.float32(0)
    exponent = abs(exact).numerator.bit_length() - abs(exact).denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return np.float32(float(round(exact / unit) * unit))


def test_fma_rounds_once():
    """The third product is 1 - 2^-46; what is near a half in float64 would be rounded twice."""
    random = np.random.default_rng(1)
    a, b, c = (random.normal(size=3000).astype(np.float32) for _ in range(3))
    a[:1000] *= np.float32(2.0**-70)
    b[:1000] *= np.float32(2.0**-70)
    c[:1000] *= np.float32(2.0**-130)
    c[1000:2000] = -(a * b)[1000:2000]
    a[2000:], b[2000:] = 1 + np.float32(2.0**-12), 1 + np.float32(2.0**-12)
    c[2000:] = np.ldexp(random.choice([-1.0, 1.0], 1000), random.integers(-80, -20, 1000))
    results = arithmetic.fma(a, b, c)
    want = [
        nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert np.array_equal(results, np.array(want))
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != results).any()


@pytest.mark.parametrize("name", ["ex2", "rcp", "rsqrt", "divide"])
def test_errors_stay_within_the_bounds_of_the_isa_and_repeat(name):
    x = np.abs(floats(10_000)[10_000:20_000]) + np.float32(1e-3)
    arguments = (x, np.float32(3) + x) if name == "divide" else (np.minimum(x, np.float32(100)),)
    exact = getattr(Approximate(), name)(*arguments, False)
    first, again, other = (getattr(Approximate(s), name)(*arguments, False) for s in (1, 1, 2))
    off = np.abs(first.astype(np.float64) / exact - 1)
    assert 2.0**-24 < off.max() < 2.0**-21.5
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
