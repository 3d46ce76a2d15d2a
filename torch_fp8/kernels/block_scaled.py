"""Groups of 8-bit codes in registers: `torch_fp8.quantization.block_scaled` in fewer instructions.

A tile is (G, 32), one group per row: a row has one scale, reduced over the last dimension. Formats
are `ByteFloat` objects, passed as compile-time constants.

Decoding shifts a code into float32's exponent and mantissa bits and multiplies by a power of two
that corrects the exponent bias. The product is exact, also for subnormal codes, which the shift
turns into subnormal float32.
"""

import triton
import triton.language as tl

from torch_fp8.quantization.formats import GRADIENT, MOMENT1, MOMENT2

MOMENT1 = tl.constexpr(MOMENT1)
MOMENT2 = tl.constexpr(MOMENT2)
GRADIENT = tl.constexpr(GRADIENT)

_ABS = tl.constexpr(0x7FFFFFFF)
_MANTISSA = tl.constexpr(0x007FFFFF)
_INF = tl.constexpr(0x7F800000)
_SCALE_ONE = tl.constexpr(127)
_SCALE_NAN = tl.constexpr(255)
_NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def decode(codes, scale, FORMAT: tl.constexpr):
    """Decode uint8 codes and (G,) uint8 scales to (G, 32) float32, exactly."""
    SHIFT: tl.constexpr = 23 - FORMAT.value.mantissa_bits
    REBIAS: tl.constexpr = 2.0 ** (127 - FORMAT.value.bias)
    if FORMAT.value.name == "e4m3":  # converted by the hardware
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORMAT.value.signed:
        # Sign extension has put the sign into all upper bits, float32's sign bit included.
        bits = codes.to(tl.int8, bitcast=True).to(tl.int32) << SHIFT
        bits = _unfolded(bits & (0x7F << SHIFT), FORMAT) | (bits & -(1 << 31))
        value = bits.to(tl.float32, bitcast=True) * REBIAS
    else:
        bits = _unfolded(codes.to(tl.int32) << SHIFT, FORMAT)
        value = bits.to(tl.float32, bitcast=True) * REBIAS
    return value * _factor(scale)[:, None]


@triton.jit
def _factor(scale):
    """Return 2 ** (scale - 127), and NaN for the byte 255."""
    scale = scale.to(tl.int32)
    bits = tl.where(scale == _SCALE_NAN, _NAN_BITS, scale << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_of(scale):
    """Return 2 ** (127 - scale), (G,) float32, and 1 for the byte 255."""
    scale = scale.to(tl.int32)
    exponent = tl.where(scale == _SCALE_NAN, _SCALE_ONE, 254 - scale)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(x, FORMAT: tl.constexpr):
    """Compute the (G,) uint8 scales of (G, 32) float32."""
    bits = x.to(tl.uint32, bitcast=True)
    if FORMAT.value.signed:
        bits = bits & _ABS
    return _scale_of_amax(tl.max(bits, axis=1).to(tl.int32, bitcast=True), FORMAT)


@triton.jit
def encode(x, scale, offset, FORMAT: tl.constexpr):
    """Quantize (G, 32) float32 to uint8 codes with the scales of `scale_of`.

    The product moves magnitudes to float32's smallest exponents, where the code's bits are the
    upper bits, also of subnormal codes. The product rounds to nearest at the same bit as the
    reference's sum with the smallest normal, 23 bits under it.

    Args:
        offset: (G, 32) uint32 < 2 ** (23 - mantissa bits), added below the last kept bit for
            stochastic rounding, or None to round to nearest, ties to the even code.
    """
    SHIFT: tl.constexpr = 23 - FORMAT.value.mantissa_bits
    UNBIAS: tl.constexpr = 2.0 ** (FORMAT.value.bias - 127)
    y = x * reciprocal_of(scale)[:, None]
    bits = _folded((tl.abs(y) * UNBIAS).to(tl.uint32, bitcast=True), FORMAT)
    if offset is None:
        offset = ((bits >> SHIFT) & 1) + ((1 << (SHIFT - 1)) - 1)
    bits += offset
    # The scale keeps the codes within the largest code. If it is NaN, the codes do not matter.
    if FORMAT.value.signed:
        codes = (bits >> SHIFT) | ((y.to(tl.uint32, bitcast=True) >> 24) & 0x80)
    else:
        # A positive value never rounds to zero.
        codes = tl.maximum(bits, tl.where(x > 0, 1 << SHIFT, 0).to(tl.uint32)) >> SHIFT
    return codes.to(tl.uint8)


@triton.jit
def _folded(bits, FORMAT: tl.constexpr):
    """Fold a magnitude's uint32 bits as in `ByteFloat`, so that the upper bits are the code."""
    SHIFT: tl.constexpr = 23 - FORMAT.value.mantissa_bits
    codes = bits
    for i in tl.static_range(1, len(FORMAT.value.intercepts)):
        line = (bits << i) - (FORMAT.value.intercepts[i] << SHIFT)
        codes = tl.maximum(codes.to(tl.int32), line.to(tl.int32)).to(tl.uint32)
    return codes


@triton.jit
def _unfolded(codes, FORMAT: tl.constexpr):
    """Invert `_folded`, for int32 codes with no bits below them."""
    SHIFT: tl.constexpr = 23 - FORMAT.value.mantissa_bits
    bits = codes
    for i in tl.static_range(1, len(FORMAT.value.intercepts)):
        bits = tl.minimum(bits, (codes >> i) + ((FORMAT.value.intercepts[i] << SHIFT) >> i))
    return bits


@triton.jit
def _scale_of_amax(amax, FORMAT: tl.constexpr):
    """Compute the scale's byte, as int32, from the bits of a group's largest magnitude."""
    MAX_MANTISSA: tl.constexpr = FORMAT.value.max_bits % (1 << 23)
    MAX_EXPONENT: tl.constexpr = (FORMAT.value.max_bits >> 23) - 127
    over = ((amax & _MANTISSA) > MAX_MANTISSA).to(tl.int32)
    scale = tl.maximum((amax >> 23) - MAX_EXPONENT + over, 1)
    scale = tl.where(amax == 0, _SCALE_ONE, scale)
    # Unsigned comparison, because a NaN with sign bit is negative.
    nonfinite = amax.to(tl.uint32, bitcast=True) >= _INF
    return tl.where(nonfinite, _SCALE_NAN, scale).to(tl.uint8)
