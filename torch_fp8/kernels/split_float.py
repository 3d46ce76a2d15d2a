"""Split master weights in registers: `torch_fp8.quantization.split_float`, bit for bit.

Residuals are int8, (G, 32).
"""

import triton
import triton.language as tl

_INF = tl.constexpr(float("inf"))
_NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def join(weight, residual, RESIDUAL: tl.constexpr):
    """Join bfloat16 weights and int8 residuals, if there are any, to (G, 32) float32."""
    high = weight.to(tl.float32)
    if RESIDUAL:
        word = high.to(tl.int32, bitcast=True) + (residual.to(tl.int32) << 8)
        joined = word.to(tl.float32, bitcast=True)
        # A stale residual can turn Inf into a number or zero into NaN; the difference isn't finite.
        high = tl.where(tl.abs(joined - high) < _INF, joined, high)
    return high


@triton.jit
def split(weight, words, RESIDUAL: tl.constexpr):
    """Round float32 stochastically and split it into bfloat16 and an int8 residual.

    Without RESIDUAL, round to bfloat16; the second result is then of no use.
    """
    DROPPED: tl.constexpr = 8 if RESIDUAL else 16
    HALF: tl.constexpr = 0x8000 if RESIDUAL else 0
    offset = words.to(tl.int32, bitcast=True) & ((1 << DROPPED) - 1)
    # The offset cannot carry out of an Inf, whose lower bits are 0. The hardware's NaN is all ones
    # but for the sign, and would overflow.
    word = tl.minimum(weight.to(tl.int32, bitcast=True), _NAN_BITS) + offset
    high = ((word + HALF) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, (word >> DROPPED).to(tl.int8)
