"""Groups of 8-bit codes in registers: `torch_fp8.quantization.block_scaled` in fewer instructions.

A tile is (G, 32), one group per row: a row has one scale, reduced over the last dimension. Formats
are `ByteFloat` objects, passed as compile-time constants.

Decoding shifts a code into float32's exponent and mantissa bits and multiplies by a power of two
that corrects the exponent bias. The product is exact, also for subnormal codes, which the shift
turns into subnormal float32.

Groups of a matrix (R, K) are numbered row after row, so a tile can span several rows. Positions are
relative to the first element of the program's first group, or of its row: one 64-bit offset per
program, then 32 bits per element. The launcher picks a layout for a class of matrices:

* ``"flat"``: K is a multiple of 32, rows are whole, and addresses are multiples of 16; groups are
  adjacent in memory.
* ``"rows"``: K and addresses are multiples of 16; a 16-byte access stays within a row.
* ``"any"``: elements move one by one.
* ``"squares"``: as "flat", but groups are numbered within squares of 128 x 128 elements, 512 groups
  each, down the square's 4 columns of groups. 16 consecutive groups are 16 rows, and their
  transpose is 32 runs of 16 elements. Squares cut by the last row or column count 512, too.
"""

import triton
import triton.language as tl

from torch_fp8.quantization.formats import GRADIENT, MOMENT1, MOMENT2


@triton.jit
def at_origin(pointer, first, cols, LAYOUT: tl.constexpr):
    """Move `pointer` from the start of a matrix to the origin of a program starting at `first`.

    The alignment hints are on the result, because Triton drops hints on arguments when it inlines
    the function.
    """
    if LAYOUT == "flat":
        pointer = tl.multiple_of(pointer + first.to(tl.int64) * 32, 16)
    elif LAYOUT == "squares":
        square_row, square_col = square(first, tl.cdiv(cols, 32))
        pointer += square_row.to(tl.int64) * 128 * cols + square_col * 128
        pointer = tl.multiple_of(pointer, 16)
    else:
        pointer = pointer + (first // tl.cdiv(cols, 32)).to(tl.int64) * cols
        if LAYOUT == "rows":
            pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def square(first, groups_per_row):
    """Return the row and column, in squares, of the square that starts with group `first`."""
    squares_per_row = tl.cdiv(groups_per_row, 4)
    index = first // 512
    return index // squares_per_row, index % squares_per_row


@triton.jit
def places(first, local, num_groups, cols, LAYOUT: tl.constexpr, rows=0):
    """Return the positions of the groups `first + local`.

    Args:
        local: (G,) int32.
        cols: columns of the matrix.
        rows: number of rows of the matrix; needed for "squares" only.
    Returns:
        position (G, 32) relative to `at_origin`, a mask that broadcasts to it, and the row (G,)
        and column (G, 32) in the matrix. If "flat", row is 0 and column the index in the whole.
    """
    group = first + local
    inside = (group < num_groups)[:, None]
    lane = tl.arange(0, 32)[None, :]
    if LAYOUT == "flat":
        position, row = local[:, None] * 32 + lane, group * 0
        mask, col = inside, (group * 32)[:, None] + lane
    elif LAYOUT == "squares":
        cols = cols // 32 * 32
        square_row, square_col = square(first, cols // 32)
        within_row, within_col = local % 128, (local // 128 * 32)[:, None] + lane
        row, col = square_row * 128 + within_row, square_col * 128 + within_col
        position = (within_row * cols)[:, None] + within_col
        mask = (row < rows)[:, None] & (col < cols)
    else:
        if LAYOUT == "rows":
            cols = cols // (16) * (16)  # the compiler learns the divisibility
        groups_per_row = tl.cdiv(cols, 32)
        row = group // groups_per_row
        col = ((group - row * groups_per_row) * 32)[:, None] + lane
        position = ((row - first // groups_per_row) * cols)[:, None] + col
        mask = inside & (col < cols)
    return position, mask, row, col


@triton.jit
def scales_at_origin(pointer, first, cols, LAYOUT: tl.constexpr):
    """Move `pointer` to a matrix's scales, one per group, as `at_origin` does for elements."""
    if LAYOUT == "squares":
        groups_per_row = tl.cdiv(cols, 32)
        square_row, square_col = square(first, groups_per_row)
        return pointer + square_row.to(tl.int64) * 128 * groups_per_row + square_col * 4
    return pointer + first


@triton.jit
def scale_places(first, local, num_groups, cols, LAYOUT: tl.constexpr, rows=0):
    """Return the positions (G,) of the scales of groups `first + local`, relative to
    `scales_at_origin`, and a mask (G,).
    """
    if LAYOUT == "squares":
        groups_per_row = tl.cdiv(cols, 32)
        square_row, square_col = square(first, groups_per_row)
        row, group = local % 128, local // 128
        inside = (square_row * 128 + row < rows) & (square_col * 4 + group < groups_per_row)
        return row * groups_per_row + group, inside
    return local, first + local < num_groups


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
