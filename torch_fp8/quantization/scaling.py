"""The computation of scales from amaxes.

The scale is the dequantization scale, ``x ~= qdata.float() * scale``, always float32; its
reciprocal is never stored. ``scale = amax / format.max``, so that the largest element lands on the
format's largest number. Edges: an all-zero group has scale 1; a scale below the smallest normal
float32 is raised to it; a non-finite amax gives a non-finite scale, so that the group reads NaN.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fp8.quantization.formats import MIN_SCALE, Format

OUTLIER = 4096.0
"""The factor over a history's largest amax from which one is recorded only if its predecessor was
as large.

2^12: one that is left standing for as long as the history lasts then leaves E4M3, which reaches
from 448 down to 2^-9, 5.8 of its 17.8 powers of two for the values that were usual before.
"""

_MANTISSA_MASK = 0x007FFFFF
_EXPONENT_MASK = 0x7F800000


@torch.no_grad()
def tensor_amax(x: Tensor) -> Tensor:
    """Return max |x| as a () float32 tensor; NaN if any element is NaN, 0 for an empty tensor."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    if x.device.type == "cpu":  # the norm reads once but is not vectorized here
        return x.abs().amax().float()
    return torch.linalg.vector_norm(x, ord=float("inf"), dtype=torch.float32)


def scale_from_amax(amax: Tensor, format: Format, power_of_two: bool = False) -> Tensor:
    """Compute the dequantization scale, ``amax / format.max``, elementwise.

    Args:
        amax: any shape, float32, non-negative.
        format: E4M3 or E5M2.
        power_of_two: round the scale up to a power of two. Up, because rounding down lets the
            largest element saturate (arXiv 2506.08027 section 3 saw training diverge).
    """
    # On CUDA torch multiplies by the reciprocal of a number, and may be an ulp off what the kernels
    # find; of 7 times a power of two it is right in float64.
    scale = (amax.double() / torch.finfo(format.dtype).max).float()
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    return torch.where(amax == 0, 1.0, scale.clamp(min=MIN_SCALE))


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """Return the smallest power of two >= x, exact, for non-negative float32; Inf and NaN stay."""
    bits = x.view(torch.int32)
    rounded = ((bits + _MANTISSA_MASK) & _EXPONENT_MASK).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def push_amax(history: Tensor, amax: Tensor, algorithm: str) -> Tensor:
    """Return histories with an amax recorded in front of each.

    Args:
        history: (..., H) float32, the most recent amax first; 0 where nothing was recorded yet. The
            sign bit of the first says that an outlier was left out.
        amax: (...,) float32; 0: nothing was cast, and the history stays as it is.
        algorithm: see `past_amax`.

    A non-finite amax is not recorded: one bad batch, which the loop may skip, would otherwise
    poison the scale for H steps. It repeats the most recent entry instead. With ``max`` the same
    holds for one that is finite and more than `OUTLIER` times the history's largest: the entry
    repeated is negative then, and if the next amax is so large, too, it is no outlier and is
    recorded. In every other case this is Transformer Engine's rule.
    """
    last = history[..., 0]
    newest = torch.where(amax.isfinite(), amax, last)
    if algorithm == "max":
        past = past_amax(history, algorithm)
        is_outlier = (past > 0) & amax.isfinite() & (amax > past * OUTLIER)
        newest = torch.where(is_outlier & ~last.signbit(), -last, newest)
    pushed = torch.cat([newest[..., None], history[..., :-1]], -1)
    return torch.where((amax == 0)[..., None], history, pushed)


def past_amax(history: Tensor, algorithm: str) -> Tensor:
    """Return the amaxes (...,) that histories (..., H) suggest; 0 while they are empty.

    Args:
        history: see `push_amax`.
        algorithm: ``max`` of the history or its ``most_recent`` entry.
    """
    return history.abs().amax(-1) if algorithm == "max" else history[..., 0].abs()


def delayed_scale(past: Tensor, format: Format, margin: int) -> Tensor:
    """Compute scales from the amaxes that histories suggest: ``past * 2^margin / format.max``.

    Args:
        past: any shape, float32, see `past_amax`.
        format: E4M3 or E5M2.
        margin: headroom in powers of two.
    """
    return scale_from_amax(past, format) * 2.0**margin


def group_amax(x: Tensor, group: Any) -> Tensor:
    """Return max |x| over all ranks of `group`, () float32; not finite where any element is not.

    Backends differ in the maximum of a number and NaN, not in that of a number and infinity.
    """
    amax = tensor_amax(x)
    if group is not None:
        amax = amax.nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax
