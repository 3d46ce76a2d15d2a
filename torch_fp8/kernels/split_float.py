"""Split master weights in registers: `torch_fp8.quantization.split_float`, bit for bit.

Residuals are stored as int8: (G, 32), or for 4 bits (G, 16), two per byte with the even column in
the lower half.
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
        # A stale residual can turn Inf into a number or zero into NaN; the difference isn't finite.
        high = tl.where(tl.abs(joined - high) < _INF, joined, high)
    return high


@triton.jit
def split(weight, words, BITS: tl.constexpr):
    """Round float32 stochastically and split it into bfloat16 and a residual of BITS bits.

    The residual is in the low bits of an int32. Read as a signed integer, it is the difference
    between the rounded value and the nearest bfloat16.
    """
    DROPPED: tl.constexpr = 16 - BITS
    HALF: tl.constexpr = 0x8000 if BITS else 0
    offset = words.to(tl.int32, bitcast=True) & ((1 << DROPPED) - 1)
    # The offset cannot carry out of an Inf, whose lower bits are 0. The hardware's NaN is all ones
    # but for the sign, and would overflow.
    word = tl.minimum(weight.to(tl.int32, bitcast=True), _NAN_BITS) + offset
    high = ((word + HALF) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, word >> DROPPED


@triton.jit
def unpack(stored, BITS: tl.constexpr):
    """Unpack stored int8 residuals to (G, 32) int32."""
    stored = stored.to(tl.int32)
    if BITS == 4:
        stored = tl.interleave((stored << 28) >> 28, stored >> 4)  # (G, 16) to (G, 32)
    return stored


@triton.jit
def pack(residual, BITS: tl.constexpr):
    """Pack the low BITS bits of (G, 32) int32 residuals into int8 for storage."""
    if BITS == 4:
        GROUPS: tl.constexpr = residual.shape[0]
        even, odd = tl.split(tl.reshape(residual, (GROUPS, 16, 2)))
        residual = (even & 0xF) | (odd << 4)  # (G, 16)
    return residual.to(tl.int8)
