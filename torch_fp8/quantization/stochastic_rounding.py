"""Counter-based random bits for stochastic rounding, without state, and equal on every device.

The bits of an element depend on a seed, the step, the parameter and the element's index in the
whole (unsharded) tensor, and on nothing else. Replicas therefore round alike and stay equal, a
sharded tensor rounds as the whole one would, and a resumed run repeats the uninterrupted one.

A word is two rounds of a 32-bit integer hash (xor-shift and multiply, the constants of C. Wellons'
search for low bias) over the index, keyed twice. Philox, with ten rounds of wide products, would
take so many instructions that an optimizer step would no longer be memory-bound.
"""

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
MULTIPLIERS = (0x9E3779B1, 0x21F0AAAD, 0x735A2D97)
"""Multipliers of the hash: the first one spreads the index, the others mix."""

_SPREAD, _FIRST, _SECOND = MULTIPLIERS


def stream_keys(*counters: int, after: int = 0) -> tuple[int, int]:
    """Return two 32-bit keys, as signed integers, of a stream of random words.

    Args:
        counters: integers that identify the stream: seed, step, parameter, ...
        after: `stream_state` of the counters before them, for streams that share these.
    """
    state = stream_state(*counters, after=after)
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def stream_state(*counters: int, after: int = 0) -> int:
    """Return 64 bits that stand for the first counters of a stream in `stream_keys`."""
    for counter in counters:
        x = (after + 0x9E3779B97F4A7C15 + counter) & _MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
        after = x ^ (x >> 31)
    return after


def stream_states(counters: Tensor, after: Tensor) -> Tensor:
    """Return `stream_state` elementwise for tensors of one counter each, all in int64."""
    x = after + counters + (0x9E3779B97F4A7C15 - (1 << 64))
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift) & ((1 << (64 - shift)) - 1)) * (multiplier - (1 << 64))
    return x ^ (x >> 31) & ((1 << 33) - 1)


def shifted_keys(keys: tuple[int, int], offset: int) -> tuple[int, int]:
    """Return keys whose words for index i are those of `keys` for ``i + offset``."""
    return _signed((keys[0] + offset * _SPREAD) & 0xFFFFFFFF), keys[1]


def random_words(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """Return 32 random bits for each index.

    Args:
        index: int32, any shape: the element's index modulo 2^32.
        keys: keys from `stream_keys`.
    Returns:
        int32, the shape of `index`; all 32 bits are random.
    """
    x = index * _signed(_SPREAD) + keys[0]
    x = (x ^ _shifted(x, 16)) * _FIRST + keys[1]
    x = (x ^ _shifted(x, 15)) * _SECOND
    return x ^ _shifted(x, 15)


def second_words(words: Tensor, keys: tuple[int, int]) -> Tensor:
    """Return 32 more random bits for each element with a word of `random_words`."""
    return random_words(words, (keys[1], keys[0]))


def element_index(
    rows: int, cols: int, row: int, col: int, row_length: int, device: torch.device
) -> Tensor:
    """Return indices (rows, cols) int32, modulo 2^32, of the elements of a part of a matrix.

    Args:
        rows, cols: size of the part.
        row, col: position at which the part starts in the whole matrix.
        row_length: number of columns of the whole matrix.
        device: device of the result.
    """
    r = torch.arange(row, row + rows, device=device).mul_(row_length)
    return (r[:, None] + torch.arange(col, col + cols, device=device)).to(torch.int32)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift x right by `bits`, logically."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x
