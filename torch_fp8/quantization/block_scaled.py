"""8-bit storage of moments and gradients: codes of a `ByteFloat` in groups of 32 with one scale.

A matrix (R, K) becomes (R, K) uint8 codes and (R, ceil(K / 32)) uint8 scales. A scale is a power of
two in E8M0, ``2 ** (byte - 127)``; groups lie along the last dimension and never cross rows, so a
shard on dim 0 is quantized as the whole is. ``x ~= decode(codes) * 2 ** (scale - 127)``.

* The scale is the smallest that holds the group's largest magnitude. An all-zero group has scale 1.
* A group with an Inf or a NaN has the scale byte 255, and all its elements read as NaN. A value
  that rounds to 2^128 reads as Inf, as in a cast to BF16.
* Rounding is stochastic (and unbiased) with random bits, else to nearest even. Quantizing a
  dequantized tensor again, to nearest, changes no value: scales are powers of two, so every stored
  value stays representable.
* An unsigned format keeps positive values positive, so that a second moment never becomes zero
  while the first one is not.

All steps are integer operations on the bits of float32, or single float32 operations, so that
kernels can repeat them bit for bit. The layout is MXFP8's (arXiv 2506.08027).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.quantization.formats import GROUP_SIZE, ByteFloat

_MANTISSA = 0x007FFFFF
_INF = 0x7F800000
_ABS = 0x7FFFFFFF
_SCALE_ONE, _SCALE_NAN = 127, 255


class BlockScaled(NamedTuple):
    """Codes (R, K) uint8 and scales (R, ceil(K / 32)) uint8 of a matrix."""

    qdata: Tensor
    scale: Tensor


def num_groups(cols: int) -> int:
    """Return the number of groups, each with a scale, in a row of `cols` elements."""
    return -(-cols // GROUP_SIZE)


def encode(x: Tensor, format: ByteFloat, random: Tensor | None = None) -> BlockScaled:
    """Quantize a matrix in groups of 32.

    Args:
        x: (R, K) float32.
        format: format of the codes.
        random: (R, K) int32, whose low ``23 - format.mantissa_bits`` bits are added below the last
            bit of the code before truncation, or None to round to nearest, ties to the even code.
    """
    rows, cols = x.shape
    groups = num_groups(cols)
    # (R, K) -> (R, G, 32), zeros behind the last column
    padded = F.pad(x, (0, groups * GROUP_SIZE - cols)).view(rows, groups, GROUP_SIZE)
    amax = (padded.view(torch.int32) & _ABS).amax(-1)
    scale = _scale_of(amax, format)  # (R, G)
    # 2 ** (127 - scale); for the byte 255 the value does not matter.
    reciprocal = ((254 - scale).clamp(min=1) << 23).view(torch.float32)
    y = (padded * reciprocal[..., None]).view(rows, groups * GROUP_SIZE)[:, :cols]  # (R, K)
    codes = _round(y, format, random)
    if format.signed:
        codes = codes | (y.signbit().to(torch.int32) << 7)
    else:
        codes = torch.where((codes == 0) & (x > 0), 1, codes)
    return BlockScaled(codes.to(torch.uint8), scale.to(torch.uint8))


def decode(x: BlockScaled, format: ByteFloat) -> Tensor:
    """Decode to (R, K) float32, exactly."""
    codes = x.qdata.to(torch.int32)
    magnitude = codes & 0x7F if format.signed else codes
    bits = _unfolded(magnitude << (23 - format.mantissa_bits), format)
    normal = (bits + ((127 - format.bias) << 23)).view(torch.float32)
    subnormal = magnitude.float() * format.smallest
    value = torch.where(magnitude >> format.mantissa_bits != 0, normal, subnormal)
    if format.signed:
        value = torch.where(codes >= 0x80, -value, value)
    scale = x.scale.to(torch.int32)
    factor = torch.where(scale == _SCALE_NAN, torch.nan, (scale << 23).view(torch.float32))
    # (R, G) -> (R, K)
    return value * factor.repeat_interleave(GROUP_SIZE, 1)[:, : codes.shape[1]]


def _scale_of(amax: Tensor, format: ByteFloat) -> Tensor:
    """Compute the scale's byte, as int32: the exponent of amax / format.max, rounded up."""
    over = ((amax & _MANTISSA) > (format.max_bits & _MANTISSA)).to(torch.int32)
    scale = ((amax >> 23) - (format.max_bits >> 23) + 127 + over).clamp(min=1)
    scale = torch.where(amax == 0, _SCALE_ONE, scale)
    return torch.where(amax >= _INF, _SCALE_NAN, scale)


def _round(y: Tensor, format: ByteFloat, random: Tensor | None) -> Tensor:
    """Round |y| <= format.max to codes without the sign, int32."""
    shift = 23 - format.mantissa_bits
    magnitude = y.abs()
    smallest_normal = 2.0 ** (1 - format.bias)
    normal = magnitude >= smallest_normal
    # Subnormals plus the smallest normal have the mantissa's spacing, too. The sum loses at most
    # 2^-(24 - mantissa_bits) of that spacing, less than random bits resolve.
    bits = torch.where(normal, magnitude, magnitude + smallest_normal).view(torch.int32)
    # Count from zero, with the smallest normal at exponent 1.
    bits = _folded(bits - ((127 - format.bias + (~normal).to(torch.int32)) << 23), format)
    if random is None:
        offset = ((bits >> shift) & 1) + ((1 << (shift - 1)) - 1)
    else:
        offset = random & ((1 << shift) - 1)
    return ((bits + offset) >> shift).clamp(0, format.max_code)


def _folded(bits: Tensor, format: ByteFloat) -> Tensor:
    """Fold a magnitude's int32 bits as in `ByteFloat`, so that the upper bits are the code."""
    codes = bits
    for i, intercept in enumerate(format.intercepts[1:], 1):
        codes = torch.maximum(codes, (bits << i) - (intercept << (23 - format.mantissa_bits)))
    return codes


def _unfolded(codes: Tensor, format: ByteFloat) -> Tensor:
    """Invert `_folded`; exact for codes with no bits below them."""
    bits = codes
    for i, intercept in enumerate(format.intercepts[1:], 1):
        bits = torch.minimum(bits, (codes + (intercept << (23 - format.mantissa_bits))) >> i)
    return bits


MIN_NUMEL = 4096
"""Number of elements below which a parameter keeps float32 moments, as vectors do.

Such moments use little memory and are the most sensitive.
"""


_ENCODE_ROWS = 1 << 20  # number of elements that are encoded or decoded at once


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (R, K) of a parameter's matrix view: K is the last dimension, unless it is below 32.

    A short last dimension, as of a convolution's kernel, would leave groups of a few elements.
    """
    if len(shape) == 2:
        return shape[0], shape[1]
    if len(shape) < 2 or shape[-1] >= GROUP_SIZE:
        return math.prod(shape[:-1]), shape[-1]
    return shape[0], math.prod(shape[1:])


def row_parts(rows: int, cols: int) -> list[slice]:
    """Return slices of rows with about a million elements each."""
    step = max(1, _ENCODE_ROWS // max(cols, 1))
    return [slice(row, min(row + step, rows)) for row in range(0, rows, step)] if cols else []
