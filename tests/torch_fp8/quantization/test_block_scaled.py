import bisect
from fractions import Fraction

import pytest
import torch

from tests.internals import GRADIENT, MOMENT1, MOMENT2, BlockScaled, decode, encode, num_groups

FORMATS = {f.name: f for f in (MOMENT1, MOMENT2, GRADIENT)}
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


def _magnitudes(format):
    """What the codes are by the definition of a minifloat, exactly: one binade after the other."""
    exponent, bits = 1 - format.bias, format.mantissa_bits
    found = [Fraction(i, 1 << bits) * Fraction(2) ** exponent for i in range(1 << bits)]
    while len(found) <= format.max_code:
        bits += len(found) in format.finer_from
        found += [(1 + Fraction(i, 1 << bits)) * Fraction(2) ** exponent for i in range(1 << bits)]
        exponent += 1
    return found[: format.max_code + 1]


def _spacing(x, format):
    """Between the neighbours of magnitudes up to the largest one, as float64."""
    magnitudes = torch.tensor([float(m) for m in _magnitudes(format)], dtype=torch.float64)
    lower = torch.searchsorted(magnitudes, x, right=True) - 1
    return magnitudes.diff()[lower.clamp(max=format.max_code - 1)]


def _codes(format):
    codes = torch.arange(format.max_code + 1)
    return torch.cat([codes, codes + 0x80]) if format.signed else codes


def _in_groups(values, largest):
    """(N, 32): a group for each value, whose scale the second element decides."""
    groups = torch.zeros(len(values), 32)
    groups[:, 0], groups[:, 1] = values, largest
    return groups


def _around_ties(format):
    """Each middle of two neighbours, and what is 2e-6 of their distance below and above."""
    magnitudes = torch.tensor([float(m) for m in _magnitudes(format)], dtype=torch.float64)
    middle, distance = (magnitudes[1:] + magnitudes[:-1]) / 2, magnitudes.diff()
    return torch.cat([middle, middle - 2e-6 * distance, middle + 2e-6 * distance]).float()


def _wild(shape, format, seed=0):
    """Groups of any scale and spread, with denormals, zeros, enormous numbers, Inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape

    def uniform(*shape):
        return torch.rand(shape, generator=generator)

    of_groups = (uniform(rows, num_groups(cols)) * 250 - 130).repeat_interleave(32, 1)[:, :cols]
    spread = (uniform(rows, num_groups(cols)) * 40).repeat_interleave(32, 1)[:, :cols]
    exponent = (of_groups - spread * uniform(rows, cols)).clamp(max=126)
    x = (1 + uniform(rows, cols)) * torch.exp2(exponent)
    x = torch.where(uniform(rows, cols) < 0.1, torch.zeros(()), x)
    x = torch.where(uniform(rows, cols) < 0.02, torch.tensor(1e-45), x)
    x = torch.where(uniform(rows, cols) < 0.002, torch.tensor(torch.inf), x)
    x = torch.where(uniform(rows, cols) < 0.002, torch.tensor(torch.nan), x)
    x = torch.where(uniform(rows, cols) < 0.02, torch.tensor(3e38), x)
    if format.signed:
        x = torch.where(uniform(rows, cols) < 0.5, -x, x)
    return x


def _random(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


@EVERY_FORMAT
def test_numbers_of_the_format_follow_from_its_codes(format):
    magnitudes = _magnitudes(format)
    assert format.max == magnitudes[-1]
    assert format.smallest == magnitudes[1]
    assert magnitudes == sorted(set(magnitudes))
    assert torch.tensor(format.max_bits, dtype=torch.int32).view(torch.float32) == format.max


@EVERY_FORMAT
@pytest.mark.parametrize("scale", [1, 2, 100, 127, 128, 200, 230], ids=lambda s: f"2^{s - 127}")
def test_every_code_decodes_to_its_value_and_encodes_to_itself(format, scale):
    codes = _codes(format)
    qdata = _in_groups(codes, format.max_code).to(torch.uint8)
    stored = BlockScaled(qdata, torch.full((len(codes), 1), scale, dtype=torch.uint8))
    values = decode(stored, format)
    magnitudes = _magnitudes(format)
    for code, value in zip(codes.tolist(), values[:, 0].tolist(), strict=True):
        negative = format.signed and code >= 0x80
        expected = magnitudes[code - 0x80 * negative] * (-1 if negative else 1)
        assert Fraction(value) == expected * Fraction(2) ** (scale - 127), code
    for random in (None, _random(values.shape), torch.full(values.shape, -1, dtype=torch.int32)):
        again = encode(values, format, random)
        assert torch.equal(again.qdata, qdata)
        assert torch.equal(again.scale, stored.scale)


def test_first_moment_codes_are_the_bytes_of_torchs_e4m3():
    codes = _codes(MOMENT1).to(torch.uint8)
    stored = BlockScaled(codes[:, None], torch.full((len(codes), 1), 127, dtype=torch.uint8))
    assert torch.equal(decode(stored, MOMENT1)[:, 0], codes.view(torch.float8_e4m3fn).float())


@EVERY_FORMAT
def test_nearest_is_half_to_even_among_the_formats_values(format):
    magnitudes = _magnitudes(format)
    x = torch.cat([torch.rand(500) * format.max, torch.exp2(torch.rand(500) * 34 - 18)])
    x = torch.cat([_around_ties(format), x]).clamp(max=format.max)
    codes = encode(_in_groups(x, format.max), format).qdata[:, 0].tolist()
    for value, code in zip(x.tolist(), codes, strict=True):
        upper = min(bisect.bisect_left(magnitudes, Fraction(value)), format.max_code)
        candidates = [c for c in (upper - 1, upper) if c >= 0]
        distance = {c: abs(magnitudes[c] - Fraction(value)) for c in candidates}
        nearest = min(candidates, key=lambda c: (distance[c], c % 2))
        if nearest == 0 and not format.signed:
            nearest = 1  # what is positive stays positive
        assert code == nearest, value


@EVERY_FORMAT
def test_scale_is_the_smallest_power_of_two_that_holds_the_group(format):
    exact = format.max * torch.exp2(torch.arange(-100, 100).float())
    above = exact.nextafter(torch.tensor(torch.inf))
    for amax in (exact, above, torch.exp2(torch.rand(1000) * 230 - 105)):
        scale = encode(_in_groups(torch.zeros(len(amax)), amax), format).scale[:, 0]
        factor = torch.exp2(scale.double() - 127)
        assert (amax <= format.max * factor).all()
        assert (amax > format.max * factor / 2).all()


@EVERY_FORMAT
def test_tiny_groups_have_the_smallest_scale_and_zero_ones_scale_one(format):
    x = torch.stack([torch.full((32,), 1e-45), torch.full((32,), 1e-38), torch.zeros(32)])
    stored = encode(x, format)
    assert stored.scale[:, 0].tolist() == [1, 1, 127]
    assert (stored.qdata[2] == 0).all()
    back = decode(stored, format)
    assert back.isfinite().all()
    assert (back[1] - 1e-38).abs().max() <= 1e-38 * 2.0 ** -(format.mantissa_bits + 1)


@EVERY_FORMAT
def test_scales_reach_the_ends_of_float32(format):
    """What a group is divided by is a normal float32 at either end, so every product is exact."""
    ends = [2.0**-127, 2.0**-126, 2.0**-120, 2.0**120, 2.0**127, 3.4028234e38]
    for amax in ends:
        for x in {amax, amax / 2, amax * 0.75, min(amax * 1.7, 3.4028234e38)}:
            stored = encode(_in_groups(torch.zeros(1), x), format)
            scale = int(stored.scale)
            assert 1 <= scale <= 253
            assert x <= format.max * 2.0 ** (scale - 127)
            assert scale == 1 or x > format.max * 2.0 ** (scale - 128)
            back = decode(stored, format)[0, 1]
            spacing = float(_spacing(torch.tensor(x * 2.0 ** (127 - scale)).double(), format))
            assert back.isinf() if x > 3.4e38 else abs(back - x) <= spacing * 2.0 ** (scale - 128)


@EVERY_FORMAT
def test_a_group_that_is_not_finite_reads_nan_throughout_and_no_other_does(format):
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.rand(4, 100) + 0.5
        x[2, 40] = bad
        for random in (None, _random(x.shape)):
            stored = encode(x, format, random)
            expected = torch.zeros(4, 100, dtype=torch.bool)
            expected[2, 32:64] = True
            assert torch.equal(decode(stored, format).isnan(), expected)
            assert torch.equal(stored.scale == 255, expected[:, ::32])
            magnitude = stored.qdata & 0x7F if format.signed else stored.qdata
            assert (magnitude <= format.max_code).all()


@EVERY_FORMAT
def test_wild_inputs_are_off_by_less_than_the_spacing(format):
    for seed in range(20):
        x = _wild((16, 96), format, seed)
        finite = x.isfinite().view(16, 3, 32).all(-1).repeat_interleave(32, 1)
        nearest = encode(x, format)
        scale = torch.exp2(nearest.scale.double() - 127).repeat_interleave(32, 1)
        spacing = _spacing(x.double().abs() / scale, format)
        for random, share in ((None, 0.5), (_random(x.shape, seed), 1.0)):
            back = decode(encode(x, format, random), format)
            error = (back.double() - x.double()).abs() / (spacing * scale)
            lifted = (x > 0) & (x.double() < format.smallest * scale) & (not format.signed)
            assert (error[finite & ~lifted] <= share).all()
            assert (back.double() == format.smallest * scale)[finite & lifted].all()


@pytest.mark.long
@EVERY_FORMAT
def test_stochastic_rounding_is_right_in_the_mean(format):
    """Over 1,024 equidistant offsets: the mean is right to 1/2048 of a spacing, by arithmetic.

    Among the values: subnormals, those between two exponents, and those next to the largest.
    """
    magnitudes = [float(m) for m in _magnitudes(format)]
    lower = torch.tensor(magnitudes[:-1], dtype=torch.float64)
    upper = torch.tensor(magnitudes[1:], dtype=torch.float64)
    shift = 23 - format.mantissa_bits
    step = 1 << (shift - 10)
    offsets = torch.arange(1024, dtype=torch.int32)[:, None] * step + step // 2
    for fraction in (0.001, 0.3, 0.5, 0.75, 0.999):
        x = (lower + fraction * (upper - lower)).float()
        signs = (1, -1) if format.signed else (1,)
        for sign in signs:
            groups = _in_groups(sign * x, format.max)[:, None].expand(-1, 64, 32)
            total = torch.zeros(len(x), dtype=torch.float64)
            for part in offsets.view(16, 64, 1):
                random = part.expand(len(x), 64, 32).reshape(-1, 32)
                back = decode(encode(groups.reshape(-1, 32), format, random), format)
                total += back.view(len(x), 64, 32)[..., 0].double().sum(1)
            error = (total / 1024 - sign * x.double()) / (upper - lower)
            if not format.signed:
                assert total[0] / 1024 == format.smallest  # is lifted instead of lost
                error = error[1:]
            assert error.abs().max() <= 1 / 2048 + 1e-6


@EVERY_FORMAT
def test_the_low_bits_alone_decide(format):
    """The contract with kernels: an offset below the last kept bit; zero is towards zero."""
    x, shift = _wild((8, 64), format), 23 - format.mantissa_bits
    random = _random(x.shape)
    low = random & ((1 << shift) - 1)
    for a, b in zip(encode(x, format, random), encode(x, format, low), strict=True):
        assert torch.equal(a, b)
    y = torch.rand(8, 32) + 0.01
    down = decode(encode(y, format, torch.zeros_like(y, dtype=torch.int32)), format)
    up = decode(encode(y, format, torch.full_like(y, -1, dtype=torch.int32)), format)
    assert ((down <= y) & (y <= up)).all()
    assert (down < up).float().mean() > 0.9


@EVERY_FORMAT
def test_a_shard_is_stored_as_in_the_whole(format):
    x, random = _wild((12, 100), format), _random((12, 100))
    whole = encode(x, format, random)
    for rows, cols in (((0, 5), (0, 100)), ((5, 12), (0, 100)), ((3, 9), (32, 96))):
        rows, cols = slice(*rows), slice(*cols)
        part = encode(x[rows, cols], format, random[rows, cols])
        assert torch.equal(part.qdata, whole.qdata[rows, cols])
        assert torch.equal(part.scale, whole.scale[rows, cols.start // 32 : -(-cols.stop // 32)])
