"""The computation of scales from amaxes, and `ScaleSource`, the scale of a cast.

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
"""An amax above this factor times the history's largest one is recorded only if it repeats.

With 2^12, an outlier that stays in the history leaves 5.8 of E4M3's 17.8 powers of two (448 down to
2^-9) to the values that were usual before.
"""

SMOOTH_RANGE = 32
"""Powers of two below the largest channel at which Smooth-SwiGLU's channels are equally small."""

_MANTISSA_MASK = 0x007FFFFF
_EXPONENT_MASK = 0x7F800000


@torch.no_grad()
def tensor_amax(x: Tensor) -> Tensor:
    """Return max |x| as a () float32 tensor; NaN if any element is NaN, 0 for an empty tensor."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    if x.device.type == "cpu":  # the norm reads once, but is not vectorized on the CPU
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
    # To divide by a number, torch multiplies by its reciprocal on CUDA, which may differ by an ulp
    # from the kernels. For 7 times a power of two, float64 gives the right result.
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
    """Record an amax at the front of each history, and return the new histories.

    Args:
        history: (..., H) float32, the most recent amax first; 0 where nothing was recorded yet. The
            sign bit of the first says that an outlier was left out.
        amax: (...,) float32, or 0 if nothing was cast; the history then stays as it is.
        algorithm: see `past_amax`.

    A non-finite amax is not recorded, because one bad batch, which the loop may skip, would spoil
    the scale for H steps. The most recent entry is repeated instead. With ``max``, this also holds
    for a finite amax above `OUTLIER` times the history's largest. The repeated entry is negative
    then, and if the next amax is as large, it is no outlier and is recorded. In all other cases
    this is Transformer Engine's rule.
    """
    last = history[..., 0]
    newest = torch.where(amax.isfinite(), amax, last)
    if algorithm == "max":
        past = past_amax(history, algorithm)
        is_outlier = (past > 0) & amax.isfinite() & (amax > past * OUTLIER)
        newest = torch.where(is_outlier & ~last.signbit(), -last, newest)
    pushed = torch.cat([newest[..., None], history[..., :-1]], -1)
    return torch.where((amax == 0)[..., None], history, pushed)


def shared_amaxes(inputs: Tensor, gradients: Tensor) -> Tensor:
    """Return the amaxes (L,) of the inputs of L layers, some of which share inputs.

    The first of the layers that read a norm's result has recorded its amax. The others have
    recorded only gradients, and get the amax of the last layer before them that has one.

    Args:
        inputs, gradients: recorded amaxes (L,) float32, in the order of the layers' conversion.
    """
    place = torch.arange(len(inputs), dtype=torch.int64, device=inputs.device)
    first = torch.where(inputs == 0, 0, place).cummax(0).values
    return torch.where((inputs == 0) & (gradients > 0), inputs[first], inputs)


def past_amax(history: Tensor, algorithm: str) -> Tensor:
    """Return the amaxes (...,) for scaling from histories (..., H); 0 while they are empty.

    Args:
        history: see `push_amax`.
        algorithm: ``max`` of the history or its ``most_recent`` entry.
    """
    return history.abs().amax(-1) if algorithm == "max" else history[..., 0].abs()


def delayed_scale(past: Tensor, format: Format, margin: int) -> Tensor:
    """Compute scales from the amaxes of histories: ``past * 2^margin / format.max``.

    Args:
        past: any shape, float32, see `past_amax`.
        format: E4M3 or E5M2.
        margin: headroom in powers of two.
    """
    return scale_from_amax(past, format) * 2.0**margin


def raise_slot(slot: Tensor, amax: Tensor) -> None:
    """Raise a slot in place to the largest of `amax`.

    Args:
        slot: one magnitude, float32 or its bits in int32. They compare alike, with NaN above
            infinity, so that kernels use an atomic maximum of integers.
        amax: float32, any shape.
    """
    torch.maximum(slot, amax.amax().view(slot.dtype).view(slot.shape), out=slot)


def group_amax(x: Tensor, group: Any) -> Tensor:
    """Return max |x| over all ranks of `group`, () float32; not finite if any element is not.

    NaN becomes infinity, because backends disagree on max(number, NaN).
    """
    amax = tensor_amax(x)
    if group is not None:
        amax = amax.nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


class ScaleSource:
    """The scale of an operand, and the slot that collects its amaxes.

    Args:
        scale: () float32 dequantization scale, or None to compute it from the current tensor. The
            attribute may be replaced later, but the tensor is not written to.
        slot: magnitude that each cast raises to the largest of its input (see `raise_slot`), or
            None if amaxes are not recorded.
    """

    def __init__(self, scale: Tensor | None = None, slot: Tensor | None = None) -> None:
        self.scale, self.slot = scale, slot

    def record(self, amax: Tensor) -> None:
        """Raise the slot to the largest of `amax`.

        Args:
            amax: float32, any shape; a NaN propagates.
        """
        if self.slot is not None:
            raise_slot(self.slot, amax)


def scale_in_table(table: Tensor, row: int) -> Tensor:
    """Return a scale () of a graph from a table (..., 4) with equal scales, or one, in each row.

    If backward read the view of the table that forward reads, the graph would save the view, too.
    So backward makes its own view with `scale_in_backward`.
    """
    scale: Any = table.view(-1, 4)[row, 0]
    scale.fp8_again = lambda: table.view(-1)[4 * row]
    return scale


def scale_in_backward(scale: Any) -> Any:
    """Return backward's own view of a scale that forward has read; see `scale_in_table`."""
    again = getattr(scale, "fp8_again", None)
    return scale if again is None else again()


def payload_in_backward(payload: Any) -> Any:
    """Return a weight's payload with `scale_in_backward`, or None if it is None."""
    return payload and payload._replace(scale=scale_in_backward(payload.scale))


class TableScale(ScaleSource):
    """The source of a graph's cast with a scale from a table (L, 3, 4).

    Args:
        table, row: scales of several layers, and index of the layer.
        operand: input (0), weight (1) or gradient of the output (2), which backward casts.
        slot: see `ScaleSource`.
    """

    def __init__(self, table: Tensor, row: int, operand: int, slot: Tensor | None) -> None:
        self.table, self.row, self.operand, self.slot = table, row, operand, slot

    @property
    def scale(self) -> Any:  # type: ignore[override]
        scale = scale_in_table(self.table, 3 * self.row + self.operand)
        return scale_in_backward(scale) if self.operand == 2 else scale


def graph_source(scales: Any, row: int | None, operand: int, slot: Tensor | None) -> ScaleSource:
    """Return the source of one operand from `torch_fp8.nn.scale_buffers.graph_buffers`."""
    if scales is None or row is None:
        return ScaleSource(None if scales is None else scales[operand, 0], slot)
    return TableScale(scales, row, operand, slot)


OF_TENSOR = ScaleSource()
"""Source without a known scale: each tensor is scaled by its own amax."""
