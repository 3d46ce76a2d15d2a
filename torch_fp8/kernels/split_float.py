"""Split master weights in registers: `torch_fp8.quantization.split_float`, bit for bit.

Residuals are stored int8 (G, 32), or, two to a byte, (G, 16), even columns in the lower half.
"""

import triton
import triton.language as tl

_INF = tl.constexpr(float("inf"))
_NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def join(weight, residual, BITS: tl.constexpr):
    """Join bfloat16 weights and int32 residuals of BITS bits to (G, 32) float32."""
    high = weight.to(tl.float32)
    if BITS:
        word = high.to(tl.int32, bitcast=True) + (residual << (16 - BITS))
        joined = word.to(tl.float32, bitcast=True)
        # Stale residuals make a number of an Inf, and a NaN of a zero: neither is close to it.
        high = tl.where(tl.abs(joined - high) < _INF, joined, high)
    return high


@triton.jit
def split(weight, words, BITS: tl.constexpr):
    """Split a float32, rounded stochastically, into bfloat16 and a residual in an int32's low BITS
    bits.

    The lower bits of the rounded integer, read as signed, are the residual: what the bfloat16,
    rounded to nearest from it, lacks.
    """
    DROPPED: tl.constexpr = 16 - BITS
    HALF: tl.constexpr = 0x8000 if BITS else 0
    offset = words.to(tl.int32, bitcast=True) & ((1 << DROPPED) - 1)
    # An Inf has no bits that the offset could carry out of; the hardware's NaN is all ones, but
    # for the sign.
    word = tl.minimum(weight.to(tl.int32, bitcast=True), _NAN_BITS) + offset
    high = ((word + HALF) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, word >> DROPPED


@triton.jit
def unpack(stored, BITS: tl.constexpr):
    """Unpack int8 as stored to (G, 32) int32."""
    stored = stored.to(tl.int32)
    if BITS == 4:
        stored = tl.interleave((stored << 28) >> 28, stored >> 4)
    return stored


@triton.jit
def pack(residual, BITS: tl.constexpr):
    """Pack the low BITS bits of a (G, 32) int32 into int8 as stored."""
    if BITS == 4:
        GROUPS: tl.constexpr = residual.shape[0]
        even, odd = tl.split(tl.reshape(residual, (GROUPS, 16, 2)))
        residual = (even & 0xF) | (odd << 4)
    return residual.to(tl.int8)
