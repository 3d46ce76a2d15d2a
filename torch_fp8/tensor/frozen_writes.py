"""Checks of writes to weights that are stored as FP8 only, so that no change is silently lost.

A copy rounds its source to FP8. A change (``add_``, ``mul_``, ...) may be smaller than the steps of
E4M3, which are 6 to 12 % of a value, and then leaves the weight as it was. An adapter's delta is
such a change, and subtracting it again would not restore the bytes. So is the sum of several
changes that are large by themselves: ``p.mul_(0.9).add_(0.1 * other)`` rounds twice.
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.tensor.frozen_payload import FrozenPayload

_WRITES, _SAMPLE = 4, 1024
"""Number of consecutive writes that are summed, and of elements that are compared for that."""


class Change(NamedTuple):
    """A change of a weight by one or more writes, in all elements or in a sample of them.

    Attributes:
        names: names of the operators.
        wanted: change that the operators computed.
        error: difference between the stored and the computed values.
    """

    names: tuple[str, ...]
    wanted: Tensor
    error: Tensor

    def sample(self) -> "Change":
        """Return the change of about 1,024 elements, which lie in many rows and columns."""
        step = self.wanted.numel() // _SAMPLE | 1
        return Change(self.names, *(x.flatten()[::step].clone() for x in self[1:]))

    def is_lost(self) -> Tensor:
        """Return whether rounding has changed the weight by more than half as much, ()."""
        return self.error.square().sum() > 0.5 * self.wanted.square().sum()


def write_change(payload: FrozenPayload, values: Tensor, func: Any) -> None:
    """Write `values`, and warn if most of the change was smaller than FP8's steps.

    Args:
        payload: payload to write to.
        values: (R, C) float32, new values.
        func: operator that computed `values` from the weight; copies are not checked.
    """
    if values.is_meta or "copy" in func.__name__:
        payload.write(values)
        return
    wanted, changes = values - payload.dequantize(torch.float32), payload.changes
    payload.write(values)
    error = payload.dequantize(torch.float32).sub_(values)
    change = Change((func.overloadpacket.__name__,), wanted, error)
    payload.changes = [*changes, change.sample()][-_WRITES:]
    candidates = [change, *_sums(payload.changes)]
    lost = torch.stack([candidate.is_lost() for candidate in candidates]).tolist()
    if any(lost):
        _warn_of_loss(payload, candidates[lost.index(True)].names)


def _sums(changes: list[Change]) -> Iterator[Change]:
    """Yield the sums of the last two, three ... changes."""
    names, wanted, error = changes[-1]
    for change in changes[-2::-1]:
        names = (*change.names, *names)
        wanted, error = wanted + change.wanted, error + change.error
        yield Change(names, wanted, error)


def _warn_of_loss(payload: FrozenPayload, names: tuple[str, ...]) -> None:
    """Warn once for all weights that were frozen together."""
    owner = None if payload.owner is None else payload.owner()
    notice = getattr(owner, "thaw_notice", None)
    if notice is not None and notice.lost:
        return
    warnings.warn(
        f"{payload.name} is stored in FP8 only, and {' and '.join(names)} changed it by less than "
        "the steps between its values, which are 6 to 12 % of each: most of the change is lost, or "
        "hidden by rounding, and equally small changes, to this or other weights, will be lost "
        "too. Make larger changes in fewer steps, or keep the weights in their own dtype: "
        "FP8Config(frozen_weights='keep') or torch_fp8.thaw(model)",
        stacklevel=3,
    )
    if notice is not None:
        notice.lost = True
