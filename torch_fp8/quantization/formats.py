"""The two 8-bit floating-point formats, and every number that follows from them.

This is the only home of 448 and 57344. E4M3 holds weights and activations, E5M2 gradients, whose
range is wider (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1).
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Format(NamedTuple):
    """An FP8 format.

    Attributes:
        name: ``"e4m3"`` or ``"e5m2"``.
        dtype: torch's dtype of the payload.
        max: largest finite magnitude.
        smallest: smallest positive (subnormal) magnitude.
        mantissa_bits: stored mantissa bits; one ulp of 1.0 is ``2 ** -mantissa_bits``.
        has_inf: whether infinities exist. E4M3 has NaN only.
        cast_sqnr_db: signal-to-quantization-noise floor in dB of a scaled cast of Gaussian data,
            at any granularity (measured; the tests assert it).
    """

    name: str
    dtype: torch.dtype
    max: float
    smallest: float
    mantissa_bits: int
    has_inf: bool
    cast_sqnr_db: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9, 3, False, 31.5)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16, 2, True, 25.5)

FORMATS = {f.name: f for f in (E4M3, E5M2)}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}

GEMM_SQNR_DB = {("e4m3", "e4m3"): 28.5, ("e5m2", "e4m3"): 24.6}
"""The SQNR floor in dB of a GEMM of Gaussian operands in these formats, whatever its shape."""

MIN_SCALE = 2.0**-126
"""The smallest dequantization scale: the smallest normal float32, so that x / scale stays exact."""

MIN_CAPABILITY = (8, 9)
"""The first CUDA compute capability that casts to FP8 and multiplies it: Ada."""

GEMM_ALIGNMENT = 16
"""The contraction and output dimensions of an FP8 GEMM are multiples of this many elements."""


def format_of(dtype: torch.dtype) -> Format:
    """Return the `Format` whose payload has this dtype."""
    return _BY_DTYPE[dtype]


@dataclass(frozen=True)
class ByteFloat:
    """An 8-bit float that lives in memory only, as an integer code in a uint8; it never multiplies.

    A code counts the representable magnitudes from zero upwards: exponent field above the mantissa,
    subnormals below the first exponent, no infinities and no NaN. A signed one has its sign in bit
    7. Tensors hold the codes in groups of 32 with a shared power-of-two scale (see
    `torch_fp8.quantization.block_scaled`), which also carries what is not finite.

    A tapered one has more codes in the binades near its largest magnitude, where a group's scale
    puts what is large, than in those below. Let n be what the code would be if all binades had M
    mantissa bits, with a fraction: a float's own bits. The code is the largest of
    ``(n << i) - c[i]``, and n the smallest of ``(code + c[i]) >> i``, with c the `intercepts`:
    lines that meet where the spacing changes.

    Attributes:
        name: the name in the literature: exponent and mantissa bits, ``u`` for unsigned.
        mantissa_bits: stored mantissa bits, M.
        bias: the exponent's bias; the smallest normal magnitude is ``2 ** (1 - bias)``.
        max_code: the code of the largest magnitude.
        signed: whether bit 7 is the sign; else it belongs to the exponent.
        finer_from: first codes of the binades from which on there is one mantissa bit more, and
            again one more.
    """

    name: str
    mantissa_bits: int
    bias: int
    max_code: int
    signed: bool
    finer_from: tuple[int, ...] = ()

    @property
    def intercepts(self) -> tuple[int, ...]:
        """The intercepts c, one for each spacing from the coarsest; 0 alone where all binades are
        alike.
        """
        lines = [0]
        for code in self.finer_from:
            lines.append(code + 2 * lines[-1])
        return tuple(lines)

    @property
    def max(self) -> float:
        """The largest magnitude."""
        n = min((self.max_code + c) / (1 << i) for i, c in enumerate(self.intercepts))
        exponent, fraction = divmod(n / (1 << self.mantissa_bits), 1)
        return float((1 + fraction) * 2.0 ** (exponent - self.bias))

    @property
    def max_bits(self) -> int:
        """The largest magnitude as the bits of a float32."""
        return int.from_bytes(struct.pack("<f", self.max), "little")

    @property
    def smallest(self) -> float:
        """The smallest positive magnitude."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))


MOMENT1 = ByteFloat("e4m3", 3, 7, 0x7E, True)
"""The first moment: E4M3, whose codes are the bytes of ``torch.float8_e4m3fn``."""

MOMENT2 = ByteFloat("tapered_unsigned", 3, 15, 0xFF, False, (128,))
"""The second moment: four mantissa bits in the upper eight binades, three in fifteen below.

A v that is rounded at every step walks at random: relative to v, the variance of its error is
about half the spacing, whatever beta2 is, as long as a step moves v by a small part of the spacing.
So one bit more halves it. Of a small Llama's v, nine tenths are in the upper eight binades of their
group. Four bits in all binades would reach down to 2^-19 of the largest, these reach 2^-26
(benchmarks/evidence/moments.py).
"""

GRADIENT = ByteFloat("tapered", 3, 3, 0x7F, True, (48, 96))
"""An accumulated gradient: tapered precision (R. Morris, IEEE Transactions on Computers, 1971).

Five mantissa bits in the largest binade, four in the next three, three in five more and in the
subnormals. Every micro-batch rounds the sum again, and most of its noise is that of the elements
that are largest in their group: there the spacing is finest. The smallest step is 2^-12 of the
range, so that small elements stay, too (benchmarks/results/accumulation.csv).
"""

GROUP_SIZE = 32
"""Consecutive elements of a row that share a power-of-two scale, as in MXFP8."""
