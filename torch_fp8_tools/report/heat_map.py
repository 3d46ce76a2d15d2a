"""`HeatMap`: the values of one statistic of all layers over a run, for a drawing."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

from torch_fp8.monitor.alarm import DEFAULT_BOUNDS
from torch_fp8.monitor.series import PREFIX
from torch_fp8_tools.report.run_record import RunRecord

MOST_COLUMNS = 200
"""The maximum number of columns of a map; steps that share a column show the worst value."""


class Topic(NamedTuple):
    """The subject of a map.

    Attributes:
        title: words above it.
        statistic, kinds: the statistic and the kinds of tensors; of several kinds of a layer the
            worst is drawn.
        small_is_bad: whether small values are the bad ones.
        logarithmic: whether the colour scale is logarithmic.
        unit: the unit after numbers; shares are shown in percent.
        scale: the lowest and highest value of the colour scale.
        meaning: a sentence after the title.
    """

    title: str
    statistic: str
    kinds: tuple[str, ...]
    scale: tuple[float, float]
    meaning: str
    unit: str = ""
    small_is_bad: bool = False
    logarithmic: bool = False


_OPERANDS = ("input", "weight", "grad_output")
TOPICS = (
    Topic(
        "SQNR: what is left of each tensor",
        "sqnr",
        ("input", "weight"),
        small_is_bad=True,
        unit=" dB",
        scale=(0.0, 34.0),
        meaning="Signal-to-quantization-noise ratio of a layer's input or weight, whichever is "
        "lower. Well-scaled E4M3 has 31.5 dB; below 20 dB little is left.",
    ),
    Topic(
        "Gradients: how far the cast turns them",
        "direction_error",
        ("grad_output",),
        logarithmic=True,
        scale=(3e-4, 1.0),
        meaning="1 - cos of the gradient of a layer's output and its cast. Well-scaled E5M2 has "
        "0.0014, E4M3 0.0004.",
    ),
    Topic(
        "Underflow: values that become zero",
        "underflow",
        _OPERANDS,
        logarithmic=True,
        unit=" %",
        scale=(1e-4, 1.0),
        meaning="The share of nonzero elements that the cast turns into zero, in the worst tensor "
        "of a layer.",
    ),
    Topic(
        "Outlier channels",
        "outliers",
        ("input",),
        logarithmic=True,
        unit="x",
        scale=(1.0, 1e4),
        meaning="The largest channel of a layer's input over the median channel. With one scale "
        "for the whole tensor, few E4M3 steps are left for the other channels.",
    ),
    Topic(
        "SwiGLU alignment",
        "alignment",
        ("swiglu",),
        scale=(0.0, 1.0),
        meaning="The largest |cos| of a channel's gate and up weights. A channel whose two weights "
        "are parallel is quadratic in its input: the sporadic outliers of FP8 begin there "
        "(arXiv 2409.12517).",
    ),
    Topic(
        "Saturation: values beyond the payload",
        "saturation",
        _OPERANDS,
        logarithmic=True,
        unit=" %",
        scale=(1e-5, 1.0),
        meaning="The share of elements that are too large for the payload, in the worst tensor "
        "of a layer: delayed scaling did not predict them.",
    ),
)


class HeatMap(NamedTuple):
    """The values of a map.

    Attributes:
        topic: the subject.
        rows: the names of layers.
        columns: the first step of each column.
        values: the values row by row; NaN if not measured.
        bounds: the bounds of the alarm, each once.
        away: (row, first column, last column) of each time that a layer was out of FP8.
    """

    topic: Topic
    rows: list[str]
    columns: list[int]
    values: list[list[float]]
    bounds: list[float]
    away: list[tuple[int, int, int]]

    @property
    def is_blank(self) -> bool:
        """Return whether no value is within the colour scale, because all are perfectly healthy."""
        worst_first, (lowest, highest) = self.topic.small_is_bad, self.topic.scale
        seen = [v for row in self.values for v in row if not math.isnan(v)]
        return all((v >= highest) if worst_first else (v <= lowest) for v in seen)


def heat_map(record: RunRecord, topic: Topic) -> HeatMap | None:
    """Return the map of a topic; None if the run has no such values."""
    steps = record.steps
    each = max(1, math.ceil(len(steps) / MOST_COLUMNS))
    starts, column_of = steps[::each], {step: i // each for i, step in enumerate(steps)}
    layers: dict[str, list[float]] = {}
    for name, values in record.values.items():
        place, _, statistic = name.removeprefix(PREFIX).rpartition("/")
        layer, _, kind = place.rpartition("/")
        if statistic != topic.statistic or kind not in topic.kinds:
            continue
        row = layers.setdefault(layer, [math.nan] * len(starts))
        for step, value in values.items():
            i = column_of[step]
            if math.isnan(row[i]) or (value < row[i]) == topic.small_is_bad:
                row[i] = value
    if not layers:
        return None
    names, away = list(layers), []
    for layer, first, last in record.absences():
        inside = [i for i, start in enumerate(starts) if first <= start <= last]
        if inside and layer in layers:
            away.append((names.index(layer), inside[0], inside[-1]))
    bounds = {
        bound.least if topic.small_is_bad else bound.most
        for bound in DEFAULT_BOUNDS
        if bound.statistic == topic.statistic and bound.kind in topic.kinds
    }
    rows = short_names(names)
    return HeatMap(topic, rows, starts, list(layers.values()), sorted(bounds), away)


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of layers without the components that they all start with."""
    parts = [name.split(".") for name in names]
    holders = [p[:-1] for p in parts] if len(parts) > 1 else []
    shared = len(os.path.commonprefix(holders))  # noqa: RUF071, of lists
    return [".".join(p[shared:]) or "(model)" for p in parts]
