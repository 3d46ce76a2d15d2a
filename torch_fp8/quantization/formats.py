"""The two FP8 formats, and all constants that follow from them.

No other file defines 448 and 57344. E4M3 holds weights and activations, and E5M2 gradients, which
need a wider range (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table
1).
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

MIN_SCALE = 2.0**-126
"""The smallest dequantization scale: the smallest normal float32, so that x / scale stays exact."""

MIN_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with FP8 casts and GEMMs: Ada."""

CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the tensors that can be cast to FP8."""

GEMM_ALIGNMENT = 16
"""Contraction and output dimensions of an FP8 GEMM have to be multiples of this."""


def format_of(dtype: torch.dtype) -> Format:
    """Return the `Format` whose payload has this dtype."""
    return _BY_DTYPE[dtype]


@dataclass(frozen=True)
class ByteFloat:
    """An 8-bit float for storage only, as an integer code in a uint8; no GEMM multiplies it.

    A code counts the representable magnitudes from zero upwards: exponent field above the mantissa,
    subnormals below the first exponent, no infinities and no NaN. A signed format has its sign in
    bit 7. Tensors hold the codes in groups of 32 with a shared power-of-two scale (see
    `torch_fp8.quantization.block_scaled`), which also marks Inf and NaN.

    A tapered format has more codes in the binades near its largest magnitude, where a group's scale
    puts the largest elements, than in those below. Let n be the code, with a fraction, if all
    binades had M mantissa bits: a float's own bits. The code is the largest of
    ``(n << i) - c[i]``, and n the smallest of ``(code + c[i]) >> i``, with c the `intercepts`:
    lines that meet where the spacing changes.

    Attributes:
        name: name of the format.
        mantissa_bits: number of stored mantissa bits, M.
        bias: bias of the exponent; the smallest normal magnitude is ``2 ** (1 - bias)``.
        max_code: code of the largest magnitude.
        signed: whether bit 7 is the sign; else it belongs to the exponent.
        finer_from: first codes of the binades from which on there is one more mantissa bit each.
    """

    name: str
    mantissa_bits: int
    bias: int
    max_code: int
    signed: bool
    finer_from: tuple[int, ...] = ()

    @property
    def intercepts(self) -> tuple[int, ...]:
        """Intercepts c, one for each spacing, the coarsest first; only 0 if not tapered."""
        lines = [0]
        for code in self.finer_from:
            lines.append(code + 2 * lines[-1])
        return tuple(lines)

    @property
    def max(self) -> float:
        """Largest magnitude."""
        n = min((self.max_code + c) / (1 << i) for i, c in enumerate(self.intercepts))
        exponent, fraction = divmod(n / (1 << self.mantissa_bits), 1)
        return float((1 + fraction) * 2.0 ** (exponent - self.bias))

    @property
    def max_bits(self) -> int:
        """Bits of the largest magnitude as a float32."""
        return int.from_bytes(struct.pack("<f", self.max), "little")

    @property
    def smallest(self) -> float:
        """Smallest positive magnitude."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))


MOMENT1 = ByteFloat("e4m3", 3, 7, 0x7E, True)
"""Format of the first moment: E4M3, with the same bytes as ``torch.float8_e4m3fn``."""

MOMENT2 = ByteFloat("tapered_unsigned", 3, 15, 0xFF, False, (128,))
"""Format of the second moment: four mantissa bits in the upper eight binades, three in 15 below.

Rounding v at every step is a random walk. Relative to v, the variance of the error is about half
the spacing, for any beta2, as long as a step moves v by a small part of the spacing. So one more
bit halves it. In a small Llama, nine tenths of v are in the upper eight binades of their group.
Four bits in all binades would reach down to 2^-19 of the largest, this format reaches 2^-26
(benchmarks/results/moments.csv).
"""

GRADIENT = ByteFloat("tapered", 3, 3, 0x7F, True, (48, 96))
"""Format of accumulated gradients: tapered precision (R. Morris, IEEE Trans. on Computers, 1971).

Five mantissa bits in the largest binade, four in the next three, three in five more and in the
subnormals. Every micro-batch rounds the sum again, and most of the noise comes from the largest
elements of a group, so the spacing is finest there. The smallest step is 2^-12 of the range, so
that small elements are kept, too (benchmarks/results/accumulation.csv).
"""

GROUP_SIZE = 32
"""Number of consecutive elements of a row that share a power-of-two scale, as in MXFP8."""
