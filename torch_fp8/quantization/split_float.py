"""Split master weights: a float32 weight as a BF16 Parameter and a residual of k = 8 bits.

The bits of a float32, read as an integer, are rounded to 16 + k bits; the upper part, rounded to
nearest, is the BF16 weight, and what is left is the residual, in [-2^(k-1), 2^(k-1)). Joined they
are the rounded float32. With k = 16 the split is exact. Numbers above BF16's largest have an Inf as
their BF16 part, and a negative residual; with fewer bits `saturated` lowers them before. With k = 0
the weight is only rounded.

If code writes only the BF16 part, the old residual is wrong by at most half an ulp of BF16, so such
writes need no special handling.
"""

import torch
from torch import Tensor

RESIDUAL_BITS = 8
"""The bits of a weight below BF16 that an optimizer's step keeps."""
EXACT_BITS = 16
"""The residual bits with which a float32 weight is exact."""

_INF = 0x7F800000
_ABS = 0x7FFFFFFF
_LARGEST = 0x7F7F0000
_QUIET = 0x00400000


def split(weight: Tensor, bits: int, random: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Split a float32 weight into its BF16 part and its residual.

    Args:
        weight: float32, any shape, contiguous.
        bits: k, number of residual bits: 16, 8 or 0.
        random: int32 of the weight's shape, whose low 16 - k bits are added below the last kept
            bit, so that rounding is unbiased, or None to round to nearest.
    Returns:
        bfloat16 and int32 residual, both of the weight's shape; None with k = 0. An Inf or NaN has
        the residual 0.
    """
    i, dropped = weight.view(torch.int32), 16 - bits
    if dropped == 0:
        word = i
    else:
        offset = (1 << dropped) >> 1 if random is None else random & ((1 << dropped) - 1)
        word = (i + offset) >> dropped  # sign, exponent, 7 + k bits of the mantissa
    high = (word + ((1 << bits) >> 1)) >> bits
    finite = (i & _ABS) < _INF
    quiet = torch.where((i & _ABS) > _INF, i | _QUIET, i) >> 16
    high = torch.where(finite, high, quiet)
    residual = torch.where(finite, word - (high << bits), 0) if bits else None
    return high.to(torch.int16).view(torch.bfloat16), residual


def join(weight: Tensor, residual: Tensor | None, bits: int, exact: bool = False) -> Tensor:
    """Join a BF16 weight and its residual to the float32 weight.

    A residual that cannot be this weight's, such as that of an Inf or a negative one of a zero,
    does not count.

    Args:
        weight: bfloat16, contiguous.
        residual: integers of the weight's shape, as from `split`; None with k = 0.
        bits: k.
        exact: whether the residual certainly belongs to this weight. An Inf with a negative
            residual then is a number above BF16's largest, as k = 16 splits it.
    """
    word = weight.view(torch.int16).to(torch.int32) << bits  # room for the residual below
    if residual is not None:
        word = word + residual.to(torch.int32)
    joined = (word << (16 - bits)).view(torch.float32)
    if residual is None:
        return joined
    # A zero never has a negative residual. An old one, if code zeroed the weight, would borrow from
    # the sign bit and make a NaN.
    applies = weight.isfinite() & ((weight != 0) | (residual >= 0))
    if exact:
        applies = applies | (weight.isinf() & (residual < 0))
    return torch.where(applies, joined, weight.float())


def saturated(weight: Tensor, bits: int) -> Tensor:
    """Clamp finite float32 weights to the largest number that BF16 and k bits hold."""
    word = _LARGEST + (((1 << bits >> 1) - 1) << (16 - bits) if bits else 0)
    limit = torch.tensor(word, dtype=torch.int32, device="cpu").view(torch.float32).item()
    return torch.where(weight.isinf(), weight, weight.clamp(-limit, limit))


def residual_dtype(bits: int) -> torch.dtype:
    """Return the dtype in which a residual of 8 or 16 bits is stored."""
    return torch.int16 if bits == EXACT_BITS else torch.int8
