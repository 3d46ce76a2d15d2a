"""Losses of two variants, compared step by step: the difference, its error, time to equal loss."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_BLOCKS = 6


class Difference(NamedTuple):
    """The relative difference of losses: mean, standard error (None: unknown), number of steps."""

    mean: float
    error: float | None
    steps: int

    @property
    def is_certain(self) -> bool:
        """Whether it exceeds twice its standard error."""
        return self.error is not None and abs(self.mean) > 2 * self.error

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {100 * self.error:.2f}"
        return f"{100 * self.mean:+.2f}{error} %"


def difference(
    reference: Sequence[Mapping[int, float]], losses: Sequence[Mapping[int, float]]
) -> Difference | None:
    """Compare two variants, paired by seed and step, over the last half of their common steps.

    The difference of a step is divided by the mean of the reference, and the standard error is that
    of the means of blocks of steps, because neighbouring steps are correlated.

    Args:
        reference: losses by step, one mapping for each seed.
        losses: losses of the other variant, in the same order of seeds.
    Returns:
        The difference; None if no step is common to both.
    """
    blocks: list[float] = []
    values: list[float] = []
    for base, other in zip(reference, losses, strict=False):
        steps = last_half(base, other)
        scale = statistics.fmean(abs(base[s]) for s in steps) if steps else 0.0
        if not scale:
            continue
        apart = [(other[s] - base[s]) / scale for s in steps]
        values += apart
        count = min(_BLOCKS, len(apart))
        edges = [round(i * len(apart) / count) for i in range(count + 1)]
        pairs = itertools.pairwise(edges)
        blocks += [statistics.fmean(apart[low:high]) for low, high in pairs]
    if not values:
        return None
    error = statistics.stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else None
    return Difference(statistics.fmean(values), error, len(values))


def last_half(*losses: Mapping[int, float]) -> list[int]:
    """Return the last half of the steps in which all of these losses are finite."""
    common = set.intersection(*(set(values) for values in losses)) if losses else set()
    steps = sorted(s for s in common if all(math.isfinite(values[s]) for values in losses))
    return steps[len(steps) // 2 :]


def is_diverged(losses: Mapping[int, float]) -> bool:
    """Return whether a loss is not finite."""
    return not all(map(math.isfinite, losses.values()))


def steps_to_equal_loss(
    reference: Sequence[Mapping[int, float]], losses: Sequence[Mapping[int, float]]
) -> float | None:
    """Return the number of steps in which a variant reaches the reference's last loss.

    The difference of the losses is divided by the slope of the reference's loss over its last half,
    a straight line fitted to all seeds.

    Returns:
        The steps; None if the reference's loss does not fall there, or nothing is common.
    """
    gaps, slopes, last = [], [], 0
    for base, other in zip(reference, losses, strict=False):
        steps = last_half(base, other)
        if len(steps) < 3:
            continue
        gaps.append(statistics.fmean(other[s] - base[s] for s in steps))
        slopes.append(statistics.linear_regression(steps, [base[s] for s in steps]).slope)
        last = max(last, steps[-1])
    if not slopes:
        return None
    slope = statistics.fmean(slopes)
    if slope >= 0:
        return None
    return max(1.0, last + statistics.fmean(gaps) / -slope)
