"""`Saturation`: notices, a step later, that casts with known scales have saturated."""

import weakref
from typing import Any

import torch
from torch import Tensor

from torch_fp8.ops.hardware import is_capturing

TOLERANCE = 1 + 2**-20
"""Margin for the rounding of scales: a saturated amax exceeds its limit by more than this."""


class Saturation:
    """State shared by the layers of a model whose scales come from the last step.

    Each optimizer step compares the recorded amaxes with the scales that the casts used, on the
    device. The host reads the result at the next step, when it has arrived, without waiting. If
    a cast has saturated, it keeps its scale for the next step, and the step after that casts with
    current scales. So the jump itself scales no other step.

    Attributes:
        returns: whether casts use current scales now.
        traced: whether torch.compile has traced a layer of the model.
        count: number of operands that have saturated so far, counted once per step.
        members: the layers' `torch_fp8.nn.delayed_scaling.LayerScaling`.
    """

    def __init__(self) -> None:
        self.returns, self.traced, self.count = False, False, 0
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pending: dict[int, tuple[Tensor, Any]] = {}
        self._jumped: set[int] = set()

    def see(self, number: int, recorded: Tensor, limits: Tensor) -> Tensor:
        """Read the result of a group's last step, and compare this step's amaxes for the next one.

        Args:
            number: number of the group's first layer (`LayerScaling.number`).
            recorded, limits: amaxes and the largest numbers of the casts, float32, of one shape.
        Returns:
            The amaxes for the next scales: 0 for casts that have saturated, which keep their scales
            until a step with current scales.
        """
        if is_capturing(recorded.device):
            return recorded
        beyond = (recorded > limits * TOLERANCE) & recorded.isfinite()
        beyond = beyond & (not self.returns)  # with current scales nothing saturates
        saturated = beyond.sum()
        result = self._read(number)
        self.count += result
        self._set(number, result > 0)
        event = None
        if saturated.is_cuda:
            saturated = saturated.to("cpu", non_blocking=True)  # pinned
            event = torch.cuda.Event()
            event.record()
        self._pending[number] = saturated, event
        return torch.where(beyond, 0, recorded)

    def _read(self, number: int) -> int:
        saturated, event = self._pending.get(number, (None, None))
        if event is not None:
            event.synchronize()
        return 0 if saturated is None else int(saturated)

    def _set(self, number: int, jumped: bool) -> None:
        (self._jumped.add if jumped else self._jumped.discard)(number)
        self.returns = bool(self._jumped)
        for scaling in self.members:
            scaling.ready = scaling.known and not self.returns

    def state(self, number: int | None) -> Tensor | None:
        """Return what a group does in the next two steps, (2,) float32, or None for others."""
        if number is None or number not in self._pending:
            return None
        later = self._read(number)
        return torch.tensor([number in self._jumped, later], dtype=torch.float32, device="cpu")

    def load(self, number: int | None, state: Tensor) -> None:
        """Restore a `state`."""
        assert number is not None
        jumped, later = state.tolist()
        self._pending[number] = torch.tensor(int(later), dtype=torch.int64, device="cpu"), None
        self._set(number, bool(jumped))

    def __reduce__(self) -> Any:  # the layers of a copy have other numbers
        return Saturation, ()
