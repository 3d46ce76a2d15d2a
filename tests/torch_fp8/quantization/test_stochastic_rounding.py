import itertools

import pytest
import torch

from tests.internals import element_index, random_words, second_words, stream_keys, stream_state

N = 1 << 18
SIGMAS = 5.5  # two-sided 4e-8 each; a test makes up to a few thousand comparisons
INDEX = torch.arange(N, dtype=torch.int32)
KEYS = [stream_keys(0, 1, 0), stream_keys(7, 1000, 3), stream_keys(2**40, 1, 2)]
RECORDED_KEYS = (-1062437321, 1793398209)
RECORDED_WORDS = [661157919, -462493977, 203797518]
RECORDED_SECOND = [998754160, -1272038313, 1808593554]
EVERY_KEY = pytest.mark.parametrize("keys", KEYS, ids=["first", "later", "large_seed"])


def _words(keys, second=False, index=INDEX):
    words = random_words(index, keys)
    return second_words(words, keys) if second else words


def _bits(words):
    """(32, N) zeros and ones."""
    return torch.stack([(words >> bit) & 1 for bit in range(32)])


def _assert_even(zeros_and_ones):
    """Along the last dimension half of them are ones, within what chance allows."""
    count = zeros_and_ones.shape[-1]
    mean = zeros_and_ones.double().mean(-1)
    assert (mean - 0.5).abs().max() < SIGMAS * 0.5 / count**0.5


@EVERY_KEY
@pytest.mark.parametrize("second", [False, True], ids=["first_word", "second_word"])
def test_bits_are_uniform(keys, second):
    words = _words(keys, second)
    assert words.dtype == torch.int32
    bits = _bits(words)
    _assert_even(bits)
    for a, b in itertools.combinations(range(32), 2):
        _assert_even(bits[a] ^ bits[b])
    for shift in (0, 8, 16, 24):
        counts = ((words >> shift) & 0xFF).bincount(minlength=256).double()
        chi_squared = ((counts - N / 256) ** 2 / (N / 256)).sum()
        assert abs(chi_squared - 255) < SIGMAS * (2 * 255) ** 0.5
    # The bits that round a second moment, as a number: its first two moments.
    uniform = ((words >> 12) & 0xFFFFF).double() / (1 << 20)
    assert abs(uniform.mean() - 0.5) < SIGMAS * (1 / 12 / N) ** 0.5
    assert abs(uniform.var() - 1 / 12) < SIGMAS * (1 / 180 / N) ** 0.5


def test_keys_are_32_bit_numbers_that_name_every_counter():
    counters = itertools.product((0, 1, 2, 10**6), (0, 1, 2**31, 2**33), (0, 1, 500))
    keys = [stream_keys(*c) for c in counters]
    assert len(set(keys)) == len(keys)
    assert len({first for first, _ in keys}) == len({second for _, second in keys}) == len(keys)
    assert all(-(2**31) <= key < 2**31 for pair in keys for key in pair)
    assert stream_keys(1) != stream_keys(1, 0)
    assert stream_keys(-1) == stream_keys(2**64 - 1)
    assert stream_keys(3, after=stream_state(1, 2)) == stream_keys(1, 2, 3)


def test_the_stream_is_the_recorded_one():
    """A resumed run repeats the uninterrupted one only if these never change."""
    keys = stream_keys(1, 2, 3)
    words = random_words(torch.tensor([0, 1, -1], dtype=torch.int32), keys)
    assert keys == RECORDED_KEYS
    assert words.tolist() == RECORDED_WORDS
    assert second_words(words, keys).tolist() == RECORDED_SECOND


@pytest.mark.parametrize("part", [(0, 0, 3, 40), (2, 0, 5, 40), (0, 32, 8, 8), (3, 5, 4, 20)])
def test_a_part_of_a_matrix_has_the_bits_of_the_whole(part):
    row, col, rows, cols = part
    cpu = torch.device("cpu")
    whole = random_words(element_index(8, 40, 0, 0, 40, cpu), KEYS[0])
    shard = random_words(element_index(rows, cols, row, col, 40, cpu), KEYS[0])
    assert torch.equal(shard, whole[row : row + rows, col : col + cols])


def test_indices_of_a_large_matrix_wrap_at_32_bits():
    row, col, length = 300_000, 7, 128_256  # 3.8e10 elements before it
    index = element_index(2, 3, row, col, length, torch.device("cpu"))
    expected = [[(r * length + c) & 0xFFFFFFFF for c in (7, 8, 9)] for r in (row, row + 1)]
    assert index.dtype == torch.int32
    assert (index.to(torch.int64) & 0xFFFFFFFF).tolist() == expected
