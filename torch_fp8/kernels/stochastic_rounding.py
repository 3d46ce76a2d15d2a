"""Random words in registers: `torch_fp8.quantization.stochastic_rounding`, bit for bit."""

import triton
import triton.language as tl

from torch_fp8.quantization.stochastic_rounding import MULTIPLIERS

_SPREAD = tl.constexpr(MULTIPLIERS[0])
_FIRST = tl.constexpr(MULTIPLIERS[1])
_SECOND = tl.constexpr(MULTIPLIERS[2])


@triton.jit
def random_words(index, key0, key1):
    """Return a random uint32 word for each index modulo 2^32 (int32 or uint32)."""
    x = index.to(tl.uint32, bitcast=True) * _SPREAD + key0.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * _FIRST + key1.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 15)


@triton.jit
def second_words(words, key0, key1):
    """Return a second random word for each word of `random_words`."""
    return random_words(words, key1, key0)
