"""Linear 8-bit integers in groups of 64 with one scale, for a momentum that is orthogonalized.

A matrix (R, K) becomes (R, K) int8 codes and (R, ceil(K / 64)) BF16 scales, ``x ~= codes * scale``;
groups lie along the last dimension and never cross rows. Newton-Schulz amplifies small singular
directions, where the relative error of floats would be larger than that of a uniform grid per
group.

* The scale is the largest magnitude over 127, rounded to nearest, and that element's code is 127.
  So quantizing a dequantized tensor again, to nearest, changes no value.
* A threshold decides whether an element rounds up: the fractional part of a sum that starts at a
  hash of the element's index and grows by the golden ratio in each step. So the thresholds of an
  element spread evenly over any number of steps, and the stored values average closer to the true
  ones than with random thresholds. The hash changes every 4,096 steps.
* In a group with an Inf or a NaN, all elements read as NaN.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.quantization.stochastic_rounding import random_words, stream_keys

GROUP = 64
LARGEST = 127
_GOLDEN = 2654435769
"""The golden ratio's fraction as 32 bits."""
_EPOCH = 4096


class LinearInt8(NamedTuple):
    """Codes (R, K) int8 and scales (R, ceil(K / 64)) bfloat16 of a matrix."""

    qdata: Tensor
    scale: Tensor


def thresholds(index: Tensor, seed: int, step: int, parameter: int) -> Tensor:
    """Return the rounding thresholds of a step, in [0, 1).

    Args:
        index: int32 element indices within the whole matrix.
        seed, step, parameter: counters that determine the thresholds.
    """
    turn = (step * _GOLDEN) & 0xFFFFFFFF
    signed = turn - (1 << 32) if turn >= 1 << 31 else turn
    words = random_words(index, stream_keys(seed, step // _EPOCH, parameter)) + signed
    return ((words >> 8) & 0xFFFFFF).float() * 2.0**-24


def encode(x: Tensor, threshold: Tensor | None = None) -> LinearInt8:
    """Quantize a matrix in groups of 64.

    Args:
        x: (R, K) float32.
        threshold: (R, K) float32 in [0, 1), or None to round to nearest; an element rounds up if
            its fraction plus its threshold is at least 1.
    """
    rows, cols = x.shape
    groups = -(-cols // GROUP)
    # (R, K) -> (R, G, 64)
    padded = F.pad(x, (0, groups * GROUP - cols)).view(rows, groups, GROUP)
    amax = padded.abs().amax(-1)
    scale = (amax / LARGEST).bfloat16()
    scale = torch.where(scale == 0, 1.0, scale).bfloat16()
    y = (padded / scale.float()[..., None]).view(rows, groups * GROUP)[:, :cols]  # (R, K)
    nearest = y.round()
    if threshold is not None:  # the largest keeps code 127, so that the scale can be recovered
        nearest = torch.where(y.abs() > LARGEST - 1, nearest, torch.floor(y + threshold))
    return LinearInt8(nearest.nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(torch.int8), scale)


def decode(x: LinearInt8) -> Tensor:
    """Decode to (R, K) float32, exactly."""
    scale = x.scale.float().repeat_interleave(GROUP, 1)[:, : x.qdata.shape[1]]  # (R, K)
    return x.qdata.float() * scale
