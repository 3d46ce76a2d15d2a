"""The cast from float32 in registers to FP8 bytes that all kernels share: scale, divide, convert.

The bytes equal those of `torch_fp8.quantization.scaling` and
`torch_fp8.ops.quantize.cast_saturating` on the CPU.

* The amax is an integer maximum of bit patterns. Those of |x| are ordered like the numbers, with
  NaN > Inf > finite, so the maximum propagates NaN and does not depend on the order.
* FP8 is stored as uint8, without ``min.NaN``/``max.NaN`` instructions: next to those, Triton (3.6
  to 3.8 at least) corrupts transposed one-byte stores (triton-lang/triton#11111).
* The conversion is inline assembly (`fp8_bytes`), because the assemblers shipped with Triton lose
  bytes of Triton's own conversion.
* Divisions are fused multiply-adds. IEEE division (`div_rn`) is a branch and a call each; it took a
  hundred more registers per thread, and some kernels spilled.
* Constants of bit patterns are local to functions, because Triton checks every global of a kernel
  at each launch.
"""

import triton
import triton.language as tl


@triton.jit
def abs_bits(x):
    """Return the bits of |x| for float32 x; they are ordered like the numbers, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_bits(x):
    """Return the largest `abs_bits` of a tile, the bits of its amax."""
    return tl.max(tl.max(abs_bits(x), axis=1), axis=0)


@triton.jit
def scale_from_amax(bits, FMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Compute amax / FMAX, correctly rounded; see `divide`."""
    INF_BITS: tl.constexpr = 0x7F800000
    MANTISSA: tl.constexpr = 0x007FFFFF
    MIN_SCALE: tl.constexpr = 2.0**-126
    amax = bits.to(tl.float32, bitcast=True)
    scale = amax * (1.0 / FMAX)
    scale = tl.fma(tl.fma(-scale, FMAX, amax), 1.0 / FMAX, scale)
    scale = tl.where(bits < INF_BITS, scale, amax)
    if POWER_OF_TWO:
        scale_bits = scale.to(tl.int32, bitcast=True)
        rounded = (scale_bits + MANTISSA) & INF_BITS
        rounded = rounded.to(tl.float32, bitcast=True)
        scale = tl.where(scale_bits < INF_BITS, rounded, scale)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    return tl.where(bits == 0, 1.0, scale)


@triton.jit
def _nearer_reciprocal(scale, r, STEP: tl.constexpr):
    """Return r or its neighbor, whichever is closer to 1 / scale; the residuals are exact."""
    other = (r.to(tl.int32, bitcast=True) + STEP).to(tl.float32, bitcast=True)
    nearer = tl.abs(tl.fma(-scale, other, 1.0)) < tl.abs(tl.fma(-scale, r, 1.0))
    return tl.where(nearer, other, r)


@triton.jit
def reciprocal(scale, POWER_OF_TWO: tl.constexpr):
    """Return (1 / scale correctly rounded, scale), or (0, 0) if scale is infinite."""
    if POWER_OF_TWO:
        TWICE_BIAS: tl.constexpr = 254 << 23  # minus the bits of a power of two: its reciprocal
        bits = scale.to(tl.int32, bitcast=True)
        r = (-bits + TWICE_BIAS).to(tl.float32, bitcast=True)
    else:
        r = 1.0 / scale  # within 2 ulp
        r = tl.fma(tl.fma(-scale, r, 1.0), r, r)  # within 1
        r = _nearer_reciprocal(scale, r, 1)
        r = _nearer_reciprocal(scale, r, -1)
    infinite = scale == float("inf")
    r = tl.where(infinite, 0.0, tl.where(scale == scale, r, scale))
    return r, tl.where(infinite, 0.0, scale)


@triton.jit
def divide(x, r, s, POWER_OF_TWO: tl.constexpr):
    """Compute x / s, correctly rounded, from the r and s of `reciprocal`.

    Two residual corrections (Markstein 1990), 5 instructions in all, round correctly as long as the
    residuals are not denormal (|x| > 2^-100).
    """
    y = x * r
    if not POWER_OF_TWO:
        y = tl.fma(tl.fma(-y, s, x), r, y)
        y = tl.fma(tl.fma(-y, s, x), r, y)
    return y


@triton.jit
def fp8_bytes(x, E5M2: tl.constexpr):
    """Convert float32 to FP8 bytes, to nearest even; overflow and Inf saturate, NaN stays NaN.

    The assembly converts four values at a time and joins them by ``prmt``. Triton and LLVM join two
    pairs by ``mov.b32``; ptxas 12.8 and 12.9 then let the second conversion overwrite the first. If
    a pair is used elsewhere, too, or both are equal, they read a register that was never written.
    """
    KIND: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
    return tl.inline_asm_elementwise(
        f"""
        {{
        .reg .b16 %pair<2>;
        .reg .b32 %half<2>;
        cvt.rn.satfinite.{KIND}.f32 %pair0, $2, $1;
        cvt.rn.satfinite.{KIND}.f32 %pair1, $4, $3;
        cvt.u32.u16 %half0, %pair0;
        cvt.u32.u16 %half1, %pair1;
        prmt.b32 $0, %half0, %half1, 0x5410;
        }}
        """,
        "=r,r,r,r,r",
        [x],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def cast_bounded(x, scale, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Cast x / scale to FP8 bytes, to nearest even, for a scale from an amax that includes x.

    Nothing overflows then. If x is not finite, neither is its scale, and the result is NaN.
    """
    r, s = reciprocal(scale, POWER_OF_TWO)
    y = divide(x, r, s, POWER_OF_TWO)
    # -0.0 becomes 0.0, as in the reference. For a power of two, y is a product: adding 0.0 would be
    # fused with it, and an underflowing product would keep its sign.
    y = tl.where(y == 0.0, 0.0, y) if POWER_OF_TWO else y + 0.0
    return fp8_bytes(y, E5M2)


@triton.jit
def cast_saturating(x, scale, E5M2: tl.constexpr):
    """Cast x / scale to FP8 bytes for any scale: finite overflow saturates, Inf and NaN stay."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    r, s = reciprocal(scale, False)
    # Clamp before the division, so that no residual overflows; limit / scale is FMAX.
    limit = FMAX * scale
    y = tl.where(x > limit, limit, x)
    y = divide(tl.where(x < -limit, -limit, y), r, s, False)
    nonfinite = x - x
    if E5M2:
        INF_BITS: tl.constexpr = 0x7F800000
        E5M2_INF: tl.constexpr = 0x7C
        y += tl.where(abs_bits(x) == INF_BITS, x, nonfinite)
        q = fp8_bytes(y, E5M2)
        # The hardware's saturating conversion turns Inf into 57344.
        infinity = tl.where(y < 0, E5M2_INF + 0x80, E5M2_INF).to(tl.uint8)
        return tl.where(abs_bits(y) == INF_BITS, infinity, q)
    y += nonfinite
    return fp8_bytes(y, E5M2)
