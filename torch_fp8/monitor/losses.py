"""`Losses`: the losses of a run, kept on the device until they are fetched together."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fp8.monitor.alarm import LossSpikes
from torch_fp8.monitor.series import is_distributed
from torch_fp8.tensor.dtensor import local, waited

_TOLD = 100
"""The interval at which consecutive spikes are reported after the first one."""


def is_told(spikes: int) -> bool:
    """Return whether the last of this many consecutive spikes is reported."""
    return spikes == 1 or (spikes > 0 and spikes % _TOLD == 0)


class Losses:
    """The losses of each step, and which of them are spikes.

    Attributes:
        spikes: the spike detector.
        fetched: pairs of step and loss that are not written yet.
    """

    def __init__(self) -> None:
        self.spikes = LossSpikes()
        self.fetched: list[tuple[int, float]] = []
        self._of_step: list[Tensor] = []
        self._waiting: list[tuple[int, Tensor]] = []

    def add(self, loss: Any) -> None:
        """Add the root of a backward, if it is a single number."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._of_step.append(waited(local(loss)).detach().reshape(()).float())

    def end_step(self, step: int, device: torch.device) -> None:
        """Add up the losses since the last step, as their gradients are."""
        if self._of_step:
            total = torch.stack([loss.to(device) for loss in self._of_step]).sum()
            self._waiting.append((step, total))
            self._of_step.clear()

    def fetch(self) -> list[tuple[int, float, int]]:
        """Return (step, mean loss of all ranks, consecutive spikes up to it) of new steps."""
        if not self._waiting:
            return []
        losses = torch.stack([loss for _, loss in self._waiting])
        if is_distributed():
            dist.all_reduce(losses)
            losses = losses / dist.get_world_size()
        values = list(zip((step for step, _ in self._waiting), losses.tolist(), strict=True))
        self._waiting.clear()
        self.fetched += values
        return [(step, loss, self.spikes.count(loss)) for step, loss in values]

    def taken(self) -> list[tuple[int, float]]:
        """Return the losses that are not written yet, and mark them as written."""
        losses, self.fetched = self.fetched, []
        return losses

    def forget(self) -> None:
        """Drop losses that were not fetched."""
        self._of_step.clear()
        self._waiting.clear()

    def go_on(self, levels: Iterable[float]) -> None:
        """Judge future losses relative to these last losses."""
        self.spikes.losses.clear()
        self.spikes.losses.extend(map(float, levels))
