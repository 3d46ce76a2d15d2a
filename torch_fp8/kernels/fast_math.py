"""Arithmetic in registers: roots and quotients without a branch, a sigmoid, and random words.

`sqrt_rn` and `div_rn` test each element's exponent and call a slow path if needed. This costs a
dozen instructions and a warp barrier per element, out of about a hundred that memory leaves time
for. The functions below are the fast paths alone, which need operands far from float32's limits.
The caller's group scales bring them there. Results differ from IEEE 754 only if an element is
below 2^-100 of its group's largest, and then by one ulp.

Random words are those of `torch_fp8.quantization.stochastic_rounding`, bit for bit.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.block_scaled import reciprocal_of
from torch_fp8.quantization.stochastic_rounding import MULTIPLIERS

_SCALE_NAN = tl.constexpr(255)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _negative(x):
    """Return -x by flipping the sign; Triton's minus subtracts from zero."""
    return x * -1.0


@triton.jit
def square_root(x, scale, factor):
    """Compute sqrt(x) * factor with two roundings.

    Args:
        x: (G, 32) float32 >= 0; Inf becomes NaN.
        scale: (G,) uint8 scale of `block_scaled.scale_of`.
        factor: () float32.
    """
    scale = scale.to(tl.int32)
    half = tl.where(scale == _SCALE_NAN, 0, (scale - 127) >> 1)
    x = x * _power_of_two(-2 * half)[:, None]
    approximate = tl.rsqrt(x + 1.1754943508222875e-38)  # not Inf at 0; otherwise the sum is x
    root = x * approximate
    root = tl.fma(tl.fma(_negative(root), root, x), approximate * 0.5, root)
    return root * (factor * _power_of_two(half))[:, None]


@triton.jit
def scaled_quotient(x, scale, y, factor):
    """Compute (x / y) * factor with two roundings.

    Args:
        x: (G, 32) float32.
        scale: (G,) uint8 scale of `block_scaled.scale_of`.
        y: (G, 32) float32 between 2^-64 and 2^64; 0, Inf and NaN give NaN.
        factor: () float32.
    """
    # `block_scaled.encode` computes the same product; the compiler shares it.
    x = x * reciprocal_of(scale)[:, None]
    scale = scale.to(tl.int32)
    exponent = tl.where(scale == _SCALE_NAN, 0, scale - 127)
    r = reciprocal(y)
    quotient = x * r
    quotient = tl.fma(tl.fma(_negative(y), quotient, x), r, quotient)
    return quotient * (factor * _power_of_two(exponent))[:, None]


@triton.jit
def reciprocal(x):
    """Compute 1 / x for x between 2^-120 and 2^120; 0, Inf and NaN give NaN."""
    r = _approximate_reciprocal(x)
    return tl.fma(tl.fma(_negative(x), r, 1.0), r, r)


@triton.jit
def fast_sigmoid(x):
    """Compute 1 / (1 + exp(-x)) in four instructions; below x = -88 it is 0.

    Triton's own takes eighteen, because it supports denormal results, which do not matter to
    ``x * sigmoid(x)`` in 16 bits.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 %power<1>;
        mul.f32 %power0, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 %power0, %power0;
        add.f32 %power0, %power0, 0f3F800000;
        rcp.approx.ftz.f32 $0, %power0;
        }
        """,
        "=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _approximate_reciprocal(x):
    """Approximate 1 / x within an ulp in one instruction."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


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
