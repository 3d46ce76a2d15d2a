"""The cast from float32 in registers to FP8 bytes that all kernels share: scale, divide, convert.

Byte for byte what `torch_fp8.quantization.scaling` and `torch_fp8.ops.quantize.cast_saturating`
compute on the CPU.

* The absolute maximum is taken on bit patterns: for |x| they are ordered as the numbers are, and
  NaN > Inf > finite, so an integer maximum propagates NaN, and is the same in any order.
* FP8 leaves as uint8, and no ``min.NaN``/``max.NaN`` instruction is used: next to those, Triton
  (3.6 to 3.8 at least) corrupts transposed one-byte stores (triton-lang/triton#11111).
* The conversion is assembly (`fp8_bytes`), for the assemblers that come with Triton lose bytes of
  Triton's own.
* Divisions are fused multiply-adds. IEEE division (`div_rn`) is a branch and a call each: it took
  a hundred more registers per thread, and some kernels spilled.
* Bit patterns are named where they are used: Triton looks at each global of a kernel in each
  launch.
"""

import triton
import triton.language as tl


@triton.jit
def abs_bits(x):
    """Return the bits of |x|, x float32: ordered as the numbers are, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_bits(x):
    """Return the largest `abs_bits` of a tile, which are the bits of its amax."""
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
    """Return r or its neighbour, whichever is closer to 1 / scale; the residuals are exact."""
    other = (r.to(tl.int32, bitcast=True) + STEP).to(tl.float32, bitcast=True)
    nearer = tl.abs(tl.fma(-scale, other, 1.0)) < tl.abs(tl.fma(-scale, r, 1.0))
    return tl.where(nearer, other, r)


@triton.jit
def reciprocal(scale, POWER_OF_TWO: tl.constexpr):
    """Return (1 / scale correctly rounded, scale), with 0 and 0 for infinity."""
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
    """Compute x / s, correctly rounded, from the r and s that `reciprocal` returned.

    Two residual corrections do it (Markstein 1990), in 5 fused multiply-adds, as long as the
    residuals are not denormal, |x| > 2^-100.
    """
    y = x * r
    if not POWER_OF_TWO:
        y = tl.fma(tl.fma(-y, s, x), r, y)
        y = tl.fma(tl.fma(-y, s, x), r, y)
    return y


@triton.jit
def fp8_bytes(x, E5M2: tl.constexpr):
    """Convert float32 to FP8 bytes, to nearest even; overflow and Inf saturate, NaN stays.

    Four values at a time, joined by ``prmt``. Where ``mov.b32`` joins two pairs, as Triton and LLVM
    have it, ptxas 12.8 and 12.9 let the second conversion write into the word of the first; if a
    pair is used elsewhere, too, or both are equal, they read a register that nothing has written.
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

    Nothing can overflow then; a non-finite x made its scale non-finite, and becomes NaN itself.
    """
    r, s = reciprocal(scale, POWER_OF_TWO)
    y = divide(x, r, s, POWER_OF_TWO)
    # -0.0 becomes 0.0, as in the reference. Added to a product, 0.0 would be fused with it, and a
    # product that underflows keep its sign.
    y = tl.where(y == 0.0, 0.0, y) if POWER_OF_TWO else y + 0.0
    return fp8_bytes(y, E5M2)


@triton.jit
def cast_saturating(x, scale, E5M2: tl.constexpr):
    """Cast x / scale to FP8 bytes for any scale: finite overflow saturates, Inf and NaN stay."""
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    r, s = reciprocal(scale, False)
    # Clamped before the division, so that no residual overflows: the limit divides to FMAX.
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
