"""The figures of a run's report, drawn with matplotlib, which is imported only then."""

import importlib
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from torch_fp8_tools.report.heat_map import HeatMap, Topic

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
_BESIDE = (INK, GREEN, "#c05621", AWAY)
_MOST_LABELS, _MOST_LETTERS, _MOST_TITLE = 48, 44, 130
_RED, _APART = 0.8, 0.09
"""The position where red starts in a map's colours, and the minimum distance of labels, both from 0
to 1.
"""
_DPI = 150


def draw_loss(
    losses: Mapping[int, float],
    events: Sequence[Mapping[str, Any]],
    beside: Mapping[str, Mapping[int, float]],
    name: str,
) -> bytes:
    """Draw a run's losses, smoothed over the raw values, with its events marked, as a PNG.

    If other runs are given, a second panel below shows the difference of each run's loss to the
    first of these, because in the first panel the curves overlap.

    Args:
        losses: the loss of each step.
        events: the events of the run.
        beside: other runs to compare, name to losses; differences are relative to the first one.
        name: the name of the run.
    """
    differences = _differences(losses, beside, name)
    panels = _figure(3.6, 1.9) if differences else _figure(3.6)
    axes, panel = panels[0], panels[-1]
    steps = sorted(losses)
    axes.plot(steps, [losses[s] for s in steps], color=BLUE, alpha=0.22, linewidth=0.7)
    axes.plot(*_smoothed(losses), color=BLUE, linewidth=2.2, label=name)
    colours = dict(zip(beside, _BESIDE * len(beside), strict=False))
    for other, others in beside.items():
        axes.plot(*_smoothed(others), "--", color=colours[other], linewidth=1.3, label=other)
    _mark(axes, events)
    axes.set_ylabel("loss")
    _set_loss_limits(axes, [losses, *beside.values()])
    _dress(axes)
    axes.legend(frameon=False, fontsize=8.5, ncols=6, loc="lower left", bbox_to_anchor=(0, 0.995))
    panel.set_xlabel("step")
    if not differences:
        return _finished(axes.figure)
    panel.axhline(0.0, color=INK, linewidth=0.8)
    for other, (_, shown) in differences.items():
        colour, wide = (BLUE, 1.7) if other == name else (colours[other], 1.3)
        panel.plot(*shown, "-" if other == name else "--", color=colour, linewidth=wide)
    for step in {event["step"] for event in events}:
        panel.axvline(step, color=FAINT, linewidth=0.7, alpha=0.7)
    _set_difference_limits(panel, [shown[1] for _, shown in differences.values()])
    _dress(panel)
    base = next(iter(beside))
    ends = ", ".join(f"{other} {end:+.2f} %" for other, (end, _) in differences.items())
    words = f"difference to {base}, %; in the last twentieth: {ends}"
    panel.set_title(words, loc="left", fontsize=8.5, color=INK, pad=4)
    return _finished(axes.figure)


def _differences(
    losses: Mapping[int, float], beside: Mapping[str, Mapping[int, float]], name: str
) -> dict[str, tuple[float, tuple[list[int], list[float]]]]:
    """Return each run's difference to the first run of `beside` in %, at the end and as a curve."""
    if not beside:
        return {}
    first, *_ = beside
    runs = {name: losses} | {other: run for other, run in beside.items() if other != first}
    differences = {}
    for run, own in runs.items():
        base = beside[first]
        apart = {
            step: 100 * (own[step] / base[step] - 1)
            for step in own.keys() & base.keys()
            if base[step] and math.isfinite(own[step]) and math.isfinite(base[step])
        }
        if len(apart) > 1:
            last = [apart[step] for step in sorted(apart)[-max(1, len(apart) // 20) :]]
            differences[run] = sum(last) / len(last), _smoothed(apart)
    return differences


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


def _dress(axes: Any) -> None:
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.01)


def draw_map(heat: HeatMap) -> bytes:
    """Draw a map of layers and steps as a PNG, with a line at each bound beside the colours."""
    rows, columns = len(heat.rows), len(heat.columns)
    labels = [_cut(name) for name in heat.rows]
    tall = min(max(0.19 * rows, 0.9), 8.5)
    (axes,) = _figure(tall + 0.75)
    colors = _imported("matplotlib.colors")
    topic = heat.topic
    places = _places(heat)
    norm = colors.FuncNorm(places, topic.lowest, topic.highest)
    hues = ("#f3f8f6", "#b7dfce", "#f4d35e", "#ee964b", RED, "#7b1e3a")
    at = (0.0, 0.25 * _RED, 0.6 * _RED, _RED, _RED, 1.0)
    wanted = colors.LinearSegmentedColormap.from_list("health", list(zip(at, hues, strict=True)))
    colours = wanted.reversed() if topic.small_is_bad else wanted
    colours = colours.with_extremes(bad="#ffffff")
    shown = [
        [min(max(v, topic.lowest), topic.highest) if not math.isnan(v) else v for v in row]
        for row in heat.values
    ]
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    each = max(1, math.ceil(rows / _MOST_LABELS))
    axes.set_yticks(range(0, rows, each), labels[::each], fontsize=8)
    ticks = sorted({round(i * (columns - 1) / 8) for i in range(9)})
    axes.set_xticks(ticks, [f"{heat.columns[i]:,}" for i in ticks], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    words = textwrap.fill(f"{topic.title}. {topic.meaning}", _MOST_TITLE)
    axes.set_title(words, loc="left", fontsize=8.5, color=INK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row in range(1, rows if each == 1 else 0):  # lines would hide thin rows
        axes.axhline(row - 0.5, color="white", linewidth=0.8)
    thick = min(2.2, 0.35 * 72 * tall / rows)
    for row, first, last in heat.away:
        where = [first - 0.5, last + 0.5]
        axes.plot(where, [row, row], color=AWAY, linewidth=thick, solid_capstyle="butt")
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.02, pad=0.015, aspect=6.5 * tall)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2, color=FAINT)
    _set_bar_ticks(bar, topic, places[0])
    for bound in heat.bounds:
        if math.isfinite(bound):
            bar.ax.axhline(bound, color=INK, linewidth=1.4)
    return _finished(axes.figure)


def _places(heat: HeatMap) -> tuple[Any, Any]:
    """Return functions from values to colours and back; red starts at the strictest bound."""
    numpy = _imported("numpy")
    topic = heat.topic
    values = [topic.lowest, topic.highest]
    places = [0.0, 1.0]
    inside = [b for b in heat.bounds if topic.lowest < b < topic.highest]
    if inside:
        values.insert(1, max(inside) if topic.small_is_bad else min(inside))
        places.insert(1, 1 - _RED if topic.small_is_bad else _RED)
    if topic.logarithmic:
        values = [math.log(value) for value in values]

    def forward(x: Any) -> Any:
        x = numpy.log(numpy.maximum(x, topic.lowest)) if topic.logarithmic else x
        return numpy.interp(x, values, places)

    def back(place: Any) -> Any:
        x = numpy.interp(place, places, values)
        return numpy.exp(x) if topic.logarithmic else x

    return forward, back


def _set_bar_ticks(bar: Any, topic: Topic, place: Any) -> None:
    """Label a map's colour bar with round numbers that do not overlap."""
    low, high = topic.lowest, topic.highest
    if topic.logarithmic:
        decades = range(math.ceil(math.log10(low)), round(math.log10(high)) + 1)
        ticks = [10.0**decade for decade in decades]
    else:
        each = 5 if high > 10 else 0.2
        ticks = [low + each * i for i in range(int((high - low) / each + 1e-9) + 1)]
    labelled: list[float] = []
    for tick in ticks if topic.small_is_bad else reversed(ticks):  # label the bad end first
        if not labelled or abs(place(tick) - place(labelled[-1])) > _APART:
            labelled.append(tick)
    factor = 100 if topic.is_share else 1
    bar.set_ticks(labelled, labels=[f"{factor * tick:,.6g}{topic.unit}" for tick in labelled])
    bar.ax.minorticks_off()


def _cut(name: str) -> str:
    """Return a layer's name, cut at the start if it is too long for the map."""
    return name if len(name) <= _MOST_LETTERS else "\u2026" + name[1 - _MOST_LETTERS :]


def _imported(name: str) -> Any:
    """Import matplotlib, or numpy, which matplotlib depends on."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"torch-fp8 report needs matplotlib: pip install matplotlib ({error})"
        ) from error


def _figure(*heights: float) -> list[Any]:
    """Return the axes of a figure, one below the other, of these heights in inches."""
    module = _imported("matplotlib.figure")
    figure = module.Figure(figsize=(11, sum(heights)), facecolor="white", layout="constrained")
    rows = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    for axes in rows[:, 0]:
        axes.tick_params(colors=INK, labelsize=8.5)
        axes.xaxis.label.set_color(INK)
    return list(rows[:, 0])


def _finished(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png")
    return file.getvalue()


def _smoothed(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return centred means over about a hundredth of the run each, without non-finite losses."""
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
    """Cut off losses far above almost all others: a spike would flatten the rest."""
    values = sorted(v for losses in runs for v in losses.values() if math.isfinite(v))
    if len(values) > 20:
        low, high = values[0], values[int(0.995 * (len(values) - 1))]
        axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low) + 1e-9)


def _set_difference_limits(axes: Any, runs: Sequence[Sequence[float]]) -> None:
    """Include 0 in the panel, and cut off outliers: a run's first steps, or a spike."""
    values = sorted(v for run in runs for v in run)
    cut = len(values) // 100
    low, high = min(values[cut], 0.0), max(values[len(values) - 1 - cut], 0.0)
    room = 0.1 * (high - low) + 0.02
    axes.set_ylim(low - room, high + room)
