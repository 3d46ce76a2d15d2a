"""Bounds on statistics and losses that show that a layer, or the run, is unhealthy.

The default bounds were measured: healthy runs stay below them by the factor that docs/monitoring.md
shows, and a planted fault of each kind crosses one.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fp8.monitor.series import PREFIX
from torch_fp8.monitor.statistics import LEFT_OUT
from torch_fp8.ops.one_rank import in_several_ranks
from torch_fp8.tensor.dtensor import local, waited


class Bound(NamedTuple):
    """A bound of one statistic of one kind of tensor; `why` says what crossing it means."""

    kind: str
    statistic: str
    least: float
    most: float
    why: str


INF = math.inf
DEFAULT_BOUNDS = (
    Bound("input", "saturation", -INF, 1e-2, "values are larger than the payload can hold"),
    Bound("weight", "saturation", -INF, 1e-2, "values are larger than the payload can hold"),
    Bound("grad_output", "saturation", -INF, 1e-2, "values are larger than the payload can hold"),
    Bound("input", "underflow", -INF, 0.2, "small values become zero"),
    Bound("weight", "underflow", -INF, 0.2, "small values become zero"),
    Bound("grad_output", "underflow", -INF, 0.5, "small values become zero"),
    Bound("input", "sqnr", 20.0, INF, "little is left of the values"),
    Bound("weight", "sqnr", 20.0, INF, "little is left of the values"),
    Bound("grad_output", "direction_error", -INF, 0.1, "the gradient's direction changed"),
    Bound("input", "amax", -INF, 3e38, "Inf or NaN"),
    Bound("grad_output", "amax", 1e-30, 3e38, "a gradient is zero, Inf or NaN"),
    Bound("input", "outliers", -INF, 500.0, "one channel is far larger than the others"),
    *(
        Bound("history", operand, -INF, 0.0, "delayed scaling left amaxes out, casts saturated")
        for operand in LEFT_OUT
    ),
    Bound("graphs", "saturated", -INF, 0.0, "values were beyond the last step's scales"),
    Bound("update", "flushed", -INF, 1e-3, "v is zero while m is not"),
    Bound("update", "rms", -INF, 10.0, "v lags behind the gradient"),
    Bound("experts", "empty", -INF, 0.0, "experts had no token since the last measured step"),
    Bound("swiglu", "alignment", -INF, 0.98, "a channel's gate and up weights are parallel"),
)


class Crossing(NamedTuple):
    """A number that crosses a bound."""

    name: str
    value: float
    bound: Bound

    def __str__(self) -> str:
        is_low = self.value < self.bound.least
        sign, limit = ("<", self.bound.least) if is_low else (">", self.bound.most)
        return f"{self.name} = {self.value:.3g} {sign} {limit:g} ({self.bound.why})"


def crossings(
    series: Mapping[str, float], bounds: Sequence[Bound] = DEFAULT_BOUNDS
) -> list[Crossing]:
    """Return the numbers of `series` that cross a bound, in the order of `series`.

    Args:
        series: numbers by name, as `Series.named` returns them.
        bounds: the bounds, each for a kind and a statistic.
    """
    of = {(bound.kind, bound.statistic): bound for bound in bounds}
    crossed = []
    for name, value in series.items():
        place, _, statistic = name.rpartition("/")
        bound = of.get((place.rpartition("/")[2], statistic))
        if bound is not None and not bound.least <= value <= bound.most:
            crossed.append(Crossing(name, value, bound))
    return crossed


def layer_of(name: str) -> str:
    """Return the qualified name of the layer in a series' name."""
    return name.removeprefix(PREFIX).rpartition("/")[0].rpartition("/")[0]


class LossSpikes:
    """Finds losses that are far above the previous ones, relative to their variation.

    A loss is a spike if it is not finite, or above
    ``median + max(DEVIATIONS * spread, LEAST * |median|)``. The spread is 1.4826 times the median
    distance from the median of the last `WINDOW` losses that were not spikes, of which at least
    `MINIMUM` are needed. After `MOST` finite spikes in a row their level counts as the run's new
    level. ``in_a_row`` counts the consecutive spikes up to the last loss.
    """

    WINDOW, MINIMUM, MOST = 64, 16, 16
    DEVIATIONS, LEAST = 8.0, 0.1

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=self.WINDOW)
        self.in_a_row = self._far = 0

    def count(self, loss: float) -> int:
        """Add the loss of a step; return how many consecutive losses up to it are spikes."""
        self.in_a_row += 1
        if not math.isfinite(loss):
            return self.in_a_row
        if self._is_far(loss):
            self._far += 1
            if self._far < self.MOST:
                return self.in_a_row
            self.losses.clear()
        self.in_a_row = self._far = 0
        self.losses.append(loss)
        return 0

    def _is_far(self, loss: float) -> bool:
        if len(self.losses) < self.MINIMUM:
            return False
        middle = median(self.losses)
        spread = 1.4826 * median([abs(value - middle) for value in self.losses])
        return loss > middle + max(self.DEVIATIONS * spread, self.LEAST * abs(middle))


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
        if in_several_ranks():
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
