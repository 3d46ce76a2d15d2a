"""A 4-bit first moment in registers: `torch_fp8.quantization.ratio_int4`, bit for bit.

A tile is (G, 32), with four groups of 8 per row; scales are (G, 4).
"""

import triton
import triton.language as tl

from torch_fp8.kernels.block_scaled import MOMENT2
from torch_fp8.kernels.block_scaled import decode as decode_8_bits
from torch_fp8.kernels.fast_math import reciprocal, square_root
from torch_fp8.kernels.split_float import pack, unpack
from torch_fp8.kernels.stochastic_rounding import random_words
from torch_fp8.quantization.ratio_int4 import KEPT_BITS, LARGEST, LEAST, NAN, SEVENTH, SLACK

_LARGEST = tl.constexpr(LARGEST)
_NAN = tl.constexpr(NAN)
_SEVENTH = tl.constexpr(SEVENTH)
_KEPT_BITS = tl.constexpr(KEPT_BITS)
_LEAST = tl.constexpr(LEAST)
_ROUNDED_UP = tl.constexpr((1 << KEPT_BITS) - 1 - SLACK)
_INF = tl.constexpr(float("inf"))
_NOT_A_NUMBER = tl.constexpr(float("nan"))


@triton.jit
def decode(codes, scale, second, second_scale):
    """Decode a first moment.

    Args:
        codes: (G, 16) int8, two codes per byte.
        scale: (G, 4) uint8 scales.
        second: (G, 32) float32, the decoded second moment.
        second_scale: (G,) uint8 scales of the second moment.
    """
    codes = unpack(codes, 4)
    value = tl.where(codes == _NAN, _NOT_A_NUMBER, codes.to(tl.float32))
    return value * _each(_scale(scale)) * square_root(second, second_scale, 1.0)


@triton.jit
def encode(m, second_codes, second_scale, index, key0, key1, turn):
    """Quantize a first moment, rounded with random thresholds.

    Args:
        m: (G, 32) float32 first moment.
        second_codes, second_scale: (G, 32) and (G,) uint8, the second moment as the step stores it.
        index: (G, 32) int32 indices of the elements in the whole matrix.
        key0, key1, turn: int32 numbers that select the thresholds.
    Returns:
        codes (G, 16) int8 and scales (G, 4) uint8.
    """
    root = square_root(decode_8_bits(second_codes, second_scale, MOMENT2), second_scale, 1.0)
    ratio = tl.where(root > 0, m * reciprocal(root), 0.0)
    finite = tl.abs(ratio) < _INF
    ratio = tl.where(finite, ratio, 0.0)
    GROUPS: tl.constexpr = ratio.shape[0]
    amax = tl.max(tl.reshape(tl.abs(ratio), (GROUPS, 4, 8)), axis=2)  # (G, 4)
    bits = ((amax * _SEVENTH).to(tl.int32, bitcast=True) + _ROUNDED_UP) >> _KEPT_BITS
    scale = tl.minimum(tl.maximum(bits - _LEAST, 0), 255)
    words = random_words(index, key0, key1) + turn.to(tl.uint32, bitcast=True)
    threshold = (words >> 16).to(tl.int32).to(tl.float32) * (2.0**-16)
    codes = ratio * _each(reciprocal(_scale(scale)))
    codes = tl.minimum(tl.maximum(codes, -_LARGEST), _LARGEST) + threshold
    codes = (codes + 8.0).to(tl.int32) - 8  # rounded down
    return pack(tl.where(finite, codes, _NAN), 4), scale.to(tl.uint8)


@triton.jit
def _scale(byte):
    return ((byte.to(tl.int32) + _LEAST) << _KEPT_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _each(x):
    """Repeat (G, 4) for the 8 elements of each group, (G, 32)."""
    GROUPS: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, :, None], (GROUPS, 4, 8)), (GROUPS, 32))
