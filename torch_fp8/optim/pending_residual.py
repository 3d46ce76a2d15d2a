"""The residual of a weight that came with more bits than BF16 has, until an optimizer takes it.

A weight of an FP8 checkpoint is an E4M3 code times a float32 scale: more than the 8 bits of BF16. A
Parameter that is to be trained holds its BF16 part, and the bits below (`torch_fp8.quantization.
split_float`) wait beside it, an attribute of the Parameter, in the very tensor that becomes the
optimizer's: no byte is held that would not be held later. `take_residuals` moves them into the
optimizer when it is converted, or drops them if it keeps none. A deep copy of the Parameter, and
what `fully_shard` makes of it, has none.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_fp8.nn.weight_cache import watch
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.optim.state import (
    SMALL_RESIDUAL_BITS,
    is_large,
    residual_from_checkpoint,
    zero_residual,
)
from torch_fp8.quantization.split_float import pack, split

_ATTRIBUTE = "_fp8_pending_residual"
_SAMPLE = 256  # elements


class PendingResidual(NamedTuple):
    """A residual as stored, its bits, and a sample of the weight that it belongs to."""

    stored: Tensor
    bits: int
    sample: Tensor


@torch.no_grad()
def split_parts(parameter: nn.Parameter, parts: Any, bits: int) -> None:
    """Give a BF16 Parameter its weight in float32, some rows at a time, and keep the residual.

    What both hold together is within a relative ``2 ** -(8 + bits)`` of the weight: rounding to
    nearest leaves half a unit of 8 + `bits` significant bits.

    Args:
        parameter: (N, K) bfloat16, contiguous; its values are replaced.
        parts: pairs of row slice and float32 values (rows, K), of all rows.
        bits: the residual bits of large weights, 8, 4 or 0; a small weight has 16.
    """
    bits = bits if is_large(parameter) else SMALL_RESIDUAL_BITS
    stored = zero_residual(parameter, bits) if bits else None
    for rows, value in parts:
        high, residual = split(value, bits)
        parameter[rows] = high
        if stored is not None:
            assert residual is not None
            stored[rows] = pack(residual, bits)
    vars(parameter).pop(_ATTRIBUTE, None)
    if stored is not None:
        # A plain tuple of tensors is what torch.load(weights_only=True) reads, if somebody saves
        # Parameters instead of their data.
        setattr(parameter, _ATTRIBUTE, (stored, bits, _sample(parameter)))


def pending_residual(parameter: Tensor) -> PendingResidual | None:
    """Return the residual that waits for an optimizer; None: none does, or the weight was written
    since.
    """
    waiting = vars(parameter).get(_ATTRIBUTE)
    if waiting is None or parameter.dtype != torch.bfloat16:
        return None
    pending = PendingResidual(*waiting)
    written = not torch.equal(_sample(parameter), pending.sample.to(parameter.device))
    return None if written else pending


def _sample(parameter: Tensor) -> Tensor:
    """Return elements from the middle of a weight, which tell whether somebody has written it.

    As in `torch_fp8.optim.last_writes`, the residual of a write that is not seen is wrong by half a
    spacing of BF16.
    """
    flat = parameter.detach().reshape(-1)
    size = min(flat.numel(), _SAMPLE)
    start = (flat.numel() - size) // 2
    return flat[start : start + size].clone()


def take_residuals(optimizer: Optimizer) -> int:
    """Move the residuals that wait for an optimizer into it; return the number of weights.

    An optimizer that was not converted keeps none: they are dropped.
    """
    taken = 0
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        pending = pending_residual(parameter)
        vars(parameter).pop(_ATTRIBUTE, None)
        if pending is None or not isinstance(optimizer, Float8Optimizer):
            continue
        bits = optimizer.residual_bits(parameter)
        stored = pending.stored.to(parameter.device)
        if bits != pending.bits:
            stored = residual_from_checkpoint(parameter, stored, pending.bits, bits)
        optimizer.set_residual(parameter, stored if bits else None)
        if bits:
            watch(parameter)
            optimizer.note_weights([parameter])
        taken += 1
    return taken
