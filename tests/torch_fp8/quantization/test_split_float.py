import pytest
import torch

from tests.internals import join, split

ABS = 0x7FFFFFFF
BITS = (8, 0)
EVERY_LENGTH = pytest.mark.parametrize("bits", BITS)
LOSSLESS = (16, *BITS)


def _bits(x):
    return x.view(torch.int32).to(torch.int64)


def _floats(count=1 << 16, seed=0):
    """float32 of all finite bit patterns but the last, which BF16 rounds to Inf."""
    generator = torch.Generator().manual_seed(seed)
    i = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    edges = [0, 1, 0x7F, 0x80, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x3F800000, 0x3F7FFFFF]
    edges += [0x3F7F8000, 0x3F7F7FFF, 0x3FFFFFFF, 0x00800000, 0x007FFFFF, 0x7F7F0000, 0x7F7F6FFF]
    edges = torch.tensor(edges, dtype=torch.int32)
    i = torch.cat([i, edges, edges | -(2**31)])
    return i[(i & ABS) < 0x7F7F7000].view(torch.float32)


def _random(like, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, like.shape, generator=generator).to(torch.int32)


def test_sixteen_bits_keep_everything():
    w = _floats()
    high, residual = split(w, 16)
    assert torch.equal(_bits(join(high, residual, 16)), _bits(w))
    assert torch.equal(_bits(join(*split(w, 16, _random(w)), 16)), _bits(w))


@EVERY_LENGTH
def test_error_is_below_the_spacing_of_what_is_kept(bits):
    """In units of float32's ulp: half a spacing of 2^(16 - k) to nearest, one stochastically."""
    w = _floats()
    for random, bound in ((None, 1 << (15 - bits)), (_random(w), (1 << (16 - bits)) - 1)):
        error = (_bits(join(*split(w, bits, random), bits)) - _bits(w)).abs()
        assert error.max() <= bound
        assert error.max() >= 0.9 * bound  # and not of another k


@EVERY_LENGTH
def test_rounding_is_right_in_the_mean_exactly(bits):
    """The mean over all offsets is the float32's own integer: sum_r floor((i + r) / D) = i."""
    w = _floats(64)
    dropped = 1 << (16 - bits)
    offsets = torch.arange(dropped, dtype=torch.int32)
    weights = w[:, None].expand(-1, dropped).contiguous()
    high, residual = split(weights, bits, offsets.expand(len(w), -1))
    joined = _bits(join(high, residual, bits))
    finite = (_bits(w) & ABS) < 0x7F7F0000  # of what may round up to Inf, no mean
    assert torch.equal(joined.sum(1)[finite], (_bits(w) * dropped)[finite])


@pytest.mark.parametrize("bits", LOSSLESS)
def test_the_bf16_part_is_the_nearest_to_the_whole(bits):
    w = _floats()
    for random in (None, _random(w)):
        high, residual = split(w, bits, random)
        assert high.dtype == torch.bfloat16
        assert (_bits(high.float()) - _bits(join(high, residual, bits))).abs().max() <= 0x8000
        if residual is None:
            assert bits == 0
            continue
        half = 1 << (bits - 1)
        assert residual.min() == -half
        assert residual.max() == half - 1


def test_to_nearest_without_a_residual_is_the_cast_but_for_ties():
    w = _floats()
    tie = (_bits(w) & 0xFFFF) == 0x8000
    assert torch.equal(split(w, 0)[0][~tie], w.bfloat16()[~tie])


def test_only_the_low_bits_decide():
    w, random = _floats(), _random(_floats())
    for bits in BITS:
        low = random & ((1 << (16 - bits)) - 1)
        for a, b in zip(split(w, bits, random), split(w, bits, low), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("bits", LOSSLESS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_inf_and_nan_stay_what_they_are(bits, stochastic):
    """A carry would turn NaN into a number or Inf into NaN, a cut a signalling NaN into Inf."""
    patterns = [0x7F800000, 0x7F800001, 0x7F807FFF, 0x7FC00000, 0x7FFFFFFF, 0x7FFF8000, 0x7FA00000]
    i = torch.tensor(patterns, dtype=torch.int32)
    w = torch.cat([i, i | -(2**31)]).view(torch.float32)
    for random in (torch.full_like(i, -1).repeat(2), _random(w)) if stochastic else (None,):
        high, residual = split(w, bits, random)
        joined = join(high, residual, bits)
        assert torch.equal(joined.isnan(), w.isnan())
        assert torch.equal(joined[w.isinf()], w[w.isinf()])
        assert residual is None or (residual == 0).all()


@EVERY_LENGTH
def test_stale_residual_is_at_most_half_an_ulp_wrong(bits):
    """Somebody wrote the Parameter: every BF16 there is, under every residual."""
    written = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    half = 1 << bits >> 1
    for residual in range(-half, max(half, 1)):
        stale = torch.full(written.shape, residual, dtype=torch.int32) if bits else None
        read = join(written, stale, bits)
        finite = written.isfinite()
        assert torch.equal(read.isnan(), written.isnan())
        assert torch.equal(read[written.isinf()], written[written.isinf()].float())
        off = (_bits(read) - _bits(written.float()))[finite].abs()
        assert off.max() <= 0x8000
        assert read[finite].isfinite().all()


@pytest.mark.parametrize("bits", [16, 8])
def test_a_weight_that_somebody_zeroed_stays_tiny_and_keeps_its_sign(bits):
    """It was NaN: a negative residual borrowed from the sign bit."""
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    for residual in (-1, -(1 << bits >> 1), 1, (1 << bits >> 1) - 1):
        read = join(zeros, torch.tensor([residual, residual]), bits)
        assert (read.abs() < 2.0**-133).all()
        assert torch.equal(read.signbit(), zeros.signbit())


@EVERY_LENGTH
def test_split_and_join_again_changes_nothing(bits):
    """What is stored is representable: only an update moves a weight, never the storing."""
    w = _floats()
    high, residual = split(w, bits, _random(w))
    again = split(join(high, residual, bits), bits, _random(w, seed=2))
    assert torch.equal(again[0].view(torch.int16), high.view(torch.int16))
    assert residual is None or torch.equal(again[1], residual)
