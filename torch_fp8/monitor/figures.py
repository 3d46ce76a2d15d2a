"""The pictures of a run's report, drawn with matplotlib, which is imported when one is drawn."""

import importlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_fp8.monitor.heat_map import HeatMap

INK, FAINT, RED, BLUE, GREEN = "#1f2933", "#9aa5b1", "#d64545", "#2f6fde", "#2d9d78"
AWAY = "#8a4fd3"
EVENTS = {
    "alarm": ("#e0a100", "alarm"),
    "loss_spike": (RED, "loss spike"),
    "fallback": (AWAY, "fallback"),
    "bf16": (AWAY, "all layers in BF16"),
    "skip": ("#c05621", "step left out"),
    "restore": ("#c05621", "back to a checkpoint"),
    "return": (GREEN, "back to FP8"),
}
"""Kind of event to colour and words."""
_BESIDE = ("#9aa5b1", GREEN, "#c05621", "#8a4fd3")
_MOST_LABELS = 48
_DPI = 150


class Picture(NamedTuple):
    """A PNG, and where its axes lie, as fractions of its width and height from the top left."""

    png: bytes
    left: float
    top: float
    width: float
    height: float


def draw_loss(
    losses: Mapping[int, float],
    events: Sequence[Mapping[str, Any]],
    beside: Mapping[str, Mapping[int, float]],
    name: str,
) -> Picture:
    """Draw the losses of a run, smoothed over those as measured, with its events marked.

    Args:
        losses: step to loss.
        events: of the run.
        beside: name to losses of other runs, to compare.
        name: of the run.
    """
    figure, axes = _figure(11, 3.6, 0.062, 0.13, 0.92, 0.80)
    for (other, others), colour in zip(beside.items(), _BESIDE * 3, strict=False):
        axes.plot(*_smoothed(others), color=colour, linewidth=1.3, label=other)
    steps = sorted(losses)
    axes.plot(steps, [losses[s] for s in steps], color=BLUE, alpha=0.22, linewidth=0.7)
    axes.plot(*_smoothed(losses), color=BLUE, linewidth=1.7, label=name)
    told = set()
    for event in events:
        colour, words = EVENTS.get(str(event["event"]), (FAINT, str(event["event"])))
        label = None if words in told else words
        told.add(words)
        axes.axvline(event["step"], color=colour, linewidth=1.0, alpha=0.75, label=label)
    axes.set_ylabel("loss")
    _set_loss_limits(axes, [losses, *beside.values()])
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8.5, ncols=6, loc="lower left", bbox_to_anchor=(0, 0.995))
    return _finished(figure, axes)


def draw_map(heat: HeatMap) -> Picture:
    """Draw a map of layers and steps; the colour bar has a line at each bound."""
    rows, columns = len(heat.rows), len(heat.columns)
    tall = min(max(0.19 * rows, 0.9), 8.5)
    height, left = tall + 0.75, min(0.02 + 0.0072 * max(map(len, heat.rows)), 0.32)
    bottom = 0.5 / height
    figure, axes = _figure(11, height, left, bottom, 0.9 - left, tall / height)
    colors = importlib.import_module("matplotlib.colors")
    topic = heat.topic
    kind = colors.LogNorm if topic.logarithmic else colors.Normalize
    norm = kind(topic.lowest, topic.highest)
    wanted = colors.LinearSegmentedColormap.from_list(
        "health", ["#f3f8f6", "#b7dfce", "#f4d35e", "#ee964b", RED, "#7b1e3a"]
    )
    colours = wanted.reversed() if topic.small_is_bad else wanted
    colours.set_bad("#ffffff")
    shown = [
        [min(max(v, topic.lowest), topic.highest) if not math.isnan(v) else v for v in row]
        for row in heat.values
    ]
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    each = max(1, math.ceil(rows / _MOST_LABELS))
    axes.set_yticks(range(0, rows, each), heat.rows[::each], fontsize=8)
    ticks = sorted({round(i * (columns - 1) / 8) for i in range(9)})
    axes.set_xticks(ticks, [f"{heat.columns[i]:,}" for i in ticks], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row in range(1, rows):
        axes.axhline(row - 0.5, color="white", linewidth=0.8)
    for row, first, last in heat.away:
        where = [first - 0.5, last + 0.5]
        axes.plot(where, [row, row], color=AWAY, linewidth=2.2, solid_capstyle="butt")
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    bar_axes = figure.add_axes((0.915, bottom, 0.014, tall / height))
    bar = figure.colorbar(image, cax=bar_axes)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2, color=FAINT)
    if topic.unit:
        bar.ax.set_title(topic.unit.strip(), fontsize=8, pad=4, color=INK)
    for bound in heat.bounds:
        if math.isfinite(bound):
            bar.ax.axhline(bound, color=INK, linewidth=1.4)
    return _finished(figure, axes)


def _figure(
    width: float, height: float, left: float, bottom: float, wide: float, tall: float
) -> tuple[Any, Any]:
    try:
        made = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "torch-fp8 report draws with matplotlib: pip install 'torch-fp8[report]'"
        ) from error
    figure = made.Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((left, bottom, wide, tall))
    axes.tick_params(colors=INK, labelsize=8.5)
    axes.xaxis.label.set_color(INK)
    return figure, axes


def _finished(figure: Any, axes: Any) -> Picture:
    box, file = axes.get_position(), io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png", pil_kwargs={"optimize": True})
    return Picture(file.getvalue(), box.x0, 1 - box.y1, box.width, box.height)


def _smoothed(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return the means of about a hundredth of the run each, centred, without what is no number."""
    steps = [s for s in sorted(losses) if math.isfinite(losses[s])]
    half = max(1, len(steps) // 200)
    sums = [0.0]
    for step in steps:
        sums.append(sums[-1] + losses[step])
    means = []
    for i in range(len(steps)):
        low, high = max(0, i - half), min(len(steps), i + half + 1)
        means.append((sums[high] - sums[low]) / (high - low))
    return steps, means


def _set_loss_limits(axes: Any, runs: Sequence[Mapping[int, float]]) -> None:
    """Leave out what lies far above almost all losses: a spike would flatten the rest."""
    values = sorted(v for losses in runs for v in losses.values() if math.isfinite(v))
    if len(values) > 20:
        low, high = values[0], values[int(0.995 * (len(values) - 1))]
        axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low) + 1e-9)
