"""Adam's first moment in 4 bits: integers of its ratio to the root of the second, groups of 8.

A matrix (R, K), K even, becomes (R, ceil(K / 2)) int8 codes, two to a byte as
`torch_fp8.quantization.split_float.pack` has them, and (R, ceil(K / 8)) uint8 scales::

    m ~= code * scale(byte) * sqrt(v)      scale(byte) = (1 + byte % 32 / 32) * 2^(byte // 32 - 7)

where v is the stored second moment. Adam divides m by sqrt(v), so the ratio matters. It is of order
one for every element, while m spans decades within a group.

* Codes are -7..7; -8 reads NaN. Scales have five mantissa and three exponent bits, from 2^-7 to
  1.97: ratios up to 13.8 are held, which Adam's do not exceed where `holds` says so.
* A scale is the group's largest ratio over 7, rounded up.
* Rounding is by a threshold: the fraction of a sum that grows by the golden ratio with each step,
  as in `torch_fp8.quantization.linear_int8`. Without thresholds, values that were read and stored
  again do not change.
* A v that reads NaN makes m NaN; a v of zero makes it zero.

This takes 0.5 + 1/8 bytes per element. With groups of 16, or random thresholds, weights move less
far than with float32 moments (benchmarks/results/four_bit_moments.csv).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import BlockScaled
from torch_fp8.quantization.block_scaled import decode as decode_8_bits
from torch_fp8.quantization.formats import MOMENT2
from torch_fp8.quantization.split_float import pack, unpack

GROUP = 8
LARGEST = 7
COLUMNS = 16
"""Number of which a matrix's columns have to be a multiple: 16 bytes hold two groups of 32."""

NAN = -8
KEPT_BITS, LEAST = 18, 120 << 5
"""Number of float32 bits below a scale's five mantissa bits; upper bits of 2^-7."""
SLACK = 64
"""Float32 ulps by which a ratio may exceed a scale, because the ratio itself was rounded."""
_SHARES = torch.tensor([1 / 7, 1 / 6], device="cpu", dtype=torch.float32)
SEVENTH, SIXTH = _SHARES.tolist()


class RatioInt4(NamedTuple):
    """Codes and scales of a first moment, and those of its second moment."""

    qdata: Tensor
    scale: Tensor
    second_qdata: Tensor
    second_scale: Tensor

    @property
    def second(self) -> BlockScaled:
        """Codes and scales of the second moment."""
        return BlockScaled(self.second_qdata, self.second_scale)


def zeros(second: BlockScaled) -> RatioInt4:
    """Return a first moment of zeros for a second one."""
    codes = second.qdata
    qdata = torch.zeros_like(codes[:, ::2], dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = torch.zeros_like(codes[:, ::GROUP], memory_format=torch.contiguous_format)
    return RatioInt4(qdata, scale, *second)


def holds(beta1: float, beta2: float) -> bool:
    """Return whether the format holds all ratios of Adam with these betas, finely enough.

    By Cauchy and Schwarz no ratio exceeds (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)).
    With a beta1 above 0.9 errors last longer than what is rounded away (0.9887 of the displacement
    at 0.95, 0.99 at 0.9).
    """
    spread = (1 - beta2) * (1 - beta1**2 / beta2) if beta2 > 0 else 1.0
    if not 0 <= beta1 <= 0.9 or spread <= 0:
        return False
    return (1 - beta1) / math.sqrt(spread) <= LARGEST * (2 - 2.0**-5)


def root_of(second: BlockScaled) -> Tensor:
    """Return the root of a stored second moment, (R, K) float32, rounded once."""
    # torch's float32 sqrt on the CPU is off by one ulp for every fifth element.
    return decode_8_bits(second, MOMENT2).double().sqrt().float()


def decode(x: RatioInt4) -> Tensor:
    """Decode to (R, K) float32, with one rounding."""
    cols = x.second_qdata.shape[1]
    codes = unpack(x.qdata, 4, cols)  # (R, K / 2) -> (R, K)
    scale = _scale(x.scale.to(torch.int32)).repeat_interleave(GROUP, 1)[:, :cols]
    value = torch.where(codes == NAN, torch.nan, codes.float())
    return value * scale * root_of(x.second)


def encode(m: Tensor, second: BlockScaled, words: Tensor | None = None) -> RatioInt4:
    """Quantize a matrix.

    Args:
        m: (R, K) float32, rows of a multiple of 16 elements.
        second: codes and scales of the second moment.
        words: (R, K) int32, of `torch_fp8.quantization.linear_int8.turned_words`, whose upper half
            is the threshold; None: to nearest.
    """
    rows, cols = m.shape
    root = root_of(second)
    ratio = torch.where(root > 0, m * (1 / root), 0.0)
    finite = ratio.abs() < torch.inf
    groups = torch.where(finite, ratio, 0.0).view(rows, cols // GROUP, GROUP)  # (R, K / 8, 8)
    amax = groups.abs().amax(-1, keepdim=True) if m.numel() else groups[..., :1]  # (R, K / 8, 1)
    scale = _byte(amax * SEVENTH)
    if words is None:
        # A value that was read may have 6 as its largest code: take the scale that loses less.
        codes, other = _nearest(groups, scale), _byte(amax * SIXTH)
        lower = _nearest(groups, other)
        better = _loss(groups, lower, other) < _loss(groups, codes, scale)
        codes, scale = torch.where(better, lower, codes), torch.where(better, other, scale)
    else:
        threshold = ((words >> 16) & 0xFFFF).float().view(groups.shape) * 2.0**-16
        codes = (groups * (1 / _scale(scale))).clamp(-LARGEST, LARGEST) + threshold
        codes = (codes + 8).to(torch.int32) - 8  # rounded down
    codes = torch.where(finite, codes.view(rows, cols), NAN).to(torch.int32)
    return RatioInt4(pack(codes, 4), scale.squeeze(-1).to(torch.uint8), *second)


def _nearest(groups: Tensor, scale: Tensor) -> Tensor:
    return torch.round(groups * (1 / _scale(scale))).clamp(-LARGEST, LARGEST)


def _loss(groups: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (codes * _scale(scale) - groups).square().sum(-1, keepdim=True)


def _byte(scale: Tensor) -> Tensor:
    """Round positive float32 up to a scale's byte, int32."""
    bits = (scale.view(torch.int32) + ((1 << KEPT_BITS) - 1 - SLACK)) >> KEPT_BITS
    return (bits - LEAST).clamp(0, 255)


def _scale(byte: Tensor) -> Tensor:
    return ((byte + LEAST) << KEPT_BITS).view(torch.float32)
