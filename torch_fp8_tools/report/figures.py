"""The figures of a run's report: maps of a statistic of all layers over the run.

matplotlib is imported only to draw.
"""

import io
import math
import os
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_fp8.monitor.alarm import DEFAULT_BOUNDS
from torch_fp8.monitor.series import PREFIX
from torch_fp8_tools.host_models import imported
from torch_fp8_tools.report.run_record import RunRecord

MOST_COLUMNS = 200
"""The maximum number of columns of a map; steps that share a column show the worst value."""


class Topic(NamedTuple):
    """The subject of a map.

    Attributes:
        title: words above it.
        statistic, kinds: the statistic and the kinds of tensors; if a layer has several, the worst
            is drawn.
        small_is_bad: whether small values are the bad ones.
        unit: the unit after numbers; shares are shown in percent.
        scale: the lowest and highest value of the colour scale, logarithmic if it begins above 0.
        meaning: a sentence after the title.
    """

    title: str
    statistic: str
    kinds: tuple[str, ...]
    scale: tuple[float, float]
    meaning: str
    unit: str = ""
    small_is_bad: bool = False


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
        scale=(3e-4, 1.0),
        meaning="1 - cos of the gradient of a layer's output and its cast. Well-scaled E5M2 has "
        "0.0014, E4M3 0.0004.",
    ),
    Topic(
        "Underflow: values that become zero",
        "underflow",
        _OPERANDS,
        unit=" %",
        scale=(1e-4, 1.0),
        meaning="The share of nonzero elements that the cast turns into zero, in the worst tensor "
        "of a layer.",
    ),
    Topic(
        "Outlier channels",
        "outliers",
        ("input",),
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
    """Return the map of a topic, or None if the run has no such values."""
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


INK, RED, AWAY = "#1f2933", "#d64545", "#8a4fd3"
_MOST_LABELS, _MOST_LETTERS, _MOST_TITLE = 48, 44, 130
_DPI = 150
_WHY = "torch-fp8 report needs matplotlib"


def draw_map(heat: HeatMap) -> bytes:
    """Draw a map of layers and steps as a PNG, with a line at each bound next to the colors."""
    rows, columns, topic = len(heat.rows), len(heat.columns), heat.topic
    tall = min(max(0.19 * rows, 0.9), 8.5)
    figure = imported("matplotlib.figure", _WHY).Figure((11, tall + 0.75), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=8.5)
    norm, colours = colours_of(heat)
    shown = imported("numpy", _WHY).clip(heat.values, *topic.scale)  # an infinite value is an end
    image = axes.imshow(shown, colours, norm, aspect="auto", interpolation="nearest")
    each = max(1, math.ceil(rows / _MOST_LABELS))
    axes.set_yticks(range(0, rows, each), map(_cut, heat.rows[::each]), fontsize=8)
    ticks = sorted({round(i * (columns - 1) / 8) for i in range(9)})
    axes.set_xticks(ticks, [f"{heat.columns[i]:,}" for i in ticks], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    words = textwrap.fill(f"{topic.title}. {topic.meaning}", _MOST_TITLE)
    axes.set_title(words, loc="left", fontsize=8.5, color=INK)
    thick = min(2.2, 0.35 * 72 * tall / rows)
    for row, first, last in heat.away:
        axes.hlines(row, first - 0.5, last + 0.5, color=AWAY, linewidth=thick)
    bar = figure.colorbar(image, ax=axes, fraction=0.02, pad=0.015, aspect=6.5 * tall)
    factor = 100 if topic.unit == " %" else 1
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{factor * value:,.6g}{topic.unit}")
    for bound in filter(math.isfinite, heat.bounds):
        bar.ax.axhline(bound, color=INK, linewidth=1.4)
    file = io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png")
    return file.getvalue()


def colours_of(heat: HeatMap) -> tuple[Any, Any]:
    """Return a map's norm and colours: red begins at the strictest bound."""
    colors, topic = imported("matplotlib.colors", _WHY), heat.topic
    norm = (colors.LogNorm if topic.scale[0] > 0 else colors.Normalize)(*topic.scale)
    strict = (max if topic.small_is_bad else min)(heat.bounds, default=math.inf)
    red = float(norm(strict)) if topic.scale[0] < strict < topic.scale[1] else 0.8
    red = 1 - red if topic.small_is_bad else red
    hues = ("#f3f8f6", "#b7dfce", "#f4d35e", "#ee964b", RED, "#7b1e3a")
    places = (0.0, 0.25 * red, 0.6 * red, red, red, 1.0)
    pairs = list(zip(places, hues, strict=True))
    colours = colors.LinearSegmentedColormap.from_list("health", pairs)
    return norm, colours.reversed() if topic.small_is_bad else colours


def _cut(name: str) -> str:
    """Return a layer's name, cut at the start if it is too long for the map."""
    return name if len(name) <= _MOST_LETTERS else "\u2026" + name[1 - _MOST_LETTERS :]
