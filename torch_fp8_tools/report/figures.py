"""The figures of a run's report, drawn with matplotlib, which is imported only then."""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from torch_fp8_tools.host_models import imported
from torch_fp8_tools.report.heat_map import HeatMap

INK, FAINT, RED, BLUE, GREEN = "#1f2933", "#9aa5b1", "#d64545", "#2f6fde", "#2d9d78"
AWAY = "#8a4fd3"
EVENTS = {
    "alarm": ("#e0a100", "alarm"),
    "left_out": ("#e0a100", "amax left out"),
    "loss_spike": (RED, "loss spike"),
    "fallback": (AWAY, "fallback"),
    "return": (GREEN, "back to FP8"),
}
"""Colour and label of each kind of event."""
_MOST_LABELS, _MOST_LETTERS, _MOST_TITLE = 48, 44, 130
_DPI = 150
_WHY = "torch-fp8 report needs matplotlib"


def draw_loss(losses: Mapping[int, float], events: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw a run's losses, smoothed over the raw values, with its events marked, as a PNG.

    Args:
        losses: the loss of each step.
        events: the events of the run.
    """
    axes = _figure(3.6)
    steps = sorted(losses)
    axes.plot(steps, [losses[s] for s in steps], color=BLUE, alpha=0.22, linewidth=0.7)
    axes.plot(*_smoothed(losses), color=BLUE, linewidth=2.2, label="loss")
    _mark(axes, events)
    axes.set(xlabel="step", ylabel="loss")
    finite = list(filter(math.isfinite, losses.values()))
    if len(finite) > 20:  # a spike would flatten the rest
        low, high = imported("numpy", _WHY).quantile(finite, (0, 0.995))
        space = 0.1 * (high - low) + 1e-9
        axes.set_ylim(low - space, high + space)
    axes.grid(axis="y", color="#e4e7eb")
    axes.legend(frameon=False, fontsize=8.5, ncols=6, loc="lower left", bbox_to_anchor=(0, 0.995))
    return _finished(axes.figure)


def _mark(axes: Any, events: Sequence[Mapping[str, Any]]) -> None:
    """Mark a run's events with a line at each step, and stacked marks for each kind."""
    kinds: dict[str, list[int]] = {}
    for event in events:
        kinds.setdefault(str(event["event"]), []).append(int(event["step"]))
    for step in sorted({step for steps in kinds.values() for step in steps}):
        kind = next(kind for kind, steps in kinds.items() if step in steps)
        axes.axvline(step, color=EVENTS.get(kind, (FAINT,))[0], linewidth=0.9, alpha=0.6)
    above = axes.get_xaxis_transform()
    for i, (kind, steps) in enumerate(kinds.items()):
        colour, words = EVENTS.get(kind, (FAINT, kind))
        high = [0.97 - 0.05 * i] * len(steps)
        marks = {"color": colour, "linestyle": "", "marker": "v", "markersize": 6}
        axes.plot(steps, high, transform=above, label=words, zorder=4, **marks)


def draw_map(heat: HeatMap) -> bytes:
    """Draw a map of layers and steps as a PNG, with a line at each bound beside the colours."""
    rows, columns, topic = len(heat.rows), len(heat.columns), heat.topic
    tall = min(max(0.19 * rows, 0.9), 8.5)
    axes = _figure(tall + 0.75)
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
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.02, pad=0.015, aspect=6.5 * tall)
    factor = 100 if topic.unit == " %" else 1
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{factor * value:,.6g}{topic.unit}")
    for bound in filter(math.isfinite, heat.bounds):
        bar.ax.axhline(bound, color=INK, linewidth=1.4)
    return _finished(axes.figure)


def colours_of(heat: HeatMap) -> tuple[Any, Any]:
    """Return a map's norm and colours: red begins at the strictest bound."""
    colors, topic = imported("matplotlib.colors", _WHY), heat.topic
    norm = (colors.LogNorm if topic.logarithmic else colors.Normalize)(*topic.scale)
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


def _figure(height: float) -> Any:
    """Return the axes of a figure of this height in inches."""
    figure = imported("matplotlib.figure", _WHY).Figure((11, height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=8.5)
    return axes


def _finished(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png")
    return file.getvalue()


def _smoothed(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return centred means over about a hundredth of the run each, without non-finite losses."""
    numpy = imported("numpy", _WHY)
    steps = [s for s in sorted(losses) if math.isfinite(losses[s])]
    half = max(1, len(steps) // 200)
    sums, at = numpy.cumsum([0.0, *(losses[step] for step in steps)]), numpy.arange(len(steps))
    low, high = numpy.maximum(0, at - half), numpy.minimum(len(steps), at + half + 1)
    return steps, ((sums[high] - sums[low]) / (high - low)).tolist()
