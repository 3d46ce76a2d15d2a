"""The picture of a comparison: losses, their difference to BF16, step time and memory."""

import importlib
import io
from collections.abc import Mapping
from typing import Any

from torch_fp8_tools.compare.advice import Advice
from torch_fp8_tools.compare.outcome import Outcome, VariantOutcome

_INK, _COLOURS = "#1f2933", ("#1f2933", "#2f6fde", "#2d9d78", "#d64545", "#8a4fd3", "#c05621")
_DPI, _MIB = 130, 2**20


def draw(result: Outcome, advice: Advice, title: str) -> bytes:
    """Draw a comparison as a PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"torch-fp8 compare needs matplotlib for its picture: pip install matplotlib ({error})"
        ) from error
    figure = module.Figure(figsize=(12, 6.4), facecolor="white", layout="constrained")
    axes = figure.subplot_mosaic(
        [["loss", "time", "memory"], ["apart", "time", "memory"]], width_ratios=(2.4, 1, 1)
    )
    ran = [variant for variant in result.variants if variant.steps]
    colours = dict(zip((v.name for v in ran), _COLOURS * len(ran), strict=False))
    for variant in ran:
        style = "-" if variant.is_bf16 else "--"
        colour = colours[variant.name]
        for i, record in enumerate(variant.records):
            label = variant.name if i == 0 else "_"
            steps = list(record.losses)
            axes["loss"].plot(steps, list(record.losses.values()), color=colour, alpha=0.15)
            axes["loss"].plot(*smoothed(record.losses), style, color=colour, label=label)
        if not variant.is_bf16:
            _draw_difference(axes["apart"], result.variants[0], variant, colour)
    axes["loss"].set(ylabel="loss")
    if ran:
        axes["loss"].legend(frameon=False)
    axes["apart"].axhline(0.0, color=_INK, linewidth=0.8)
    axes["apart"].set(xlabel="optimizer step", ylabel="loss to BF16, %")
    is_emulated = result.device == "cpu"
    times = {v.name: (v.step_seconds or 0.0) * 1e3 for v in ran}
    words = "step, ms (FP8 emulated)" if is_emulated else "step, ms"
    most = max(times.values(), default=0.0)
    _bars(axes["time"], times, colours, words, "{:,.0f}" if most >= 100 else "{:.3g}")
    peaks = {v.name: (v.peak or 0) / _MIB for v in ran}
    _bars(axes["memory"], peaks, colours, "peak memory, MiB", "{:,.0f}")
    where = result.card or "a CPU"
    figure.suptitle(f"{title}, on {where}", fontsize=11, color=_INK)
    figure.supxlabel(advice.sentence, fontsize=9, color=_INK, wrap=True)
    file = io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png")
    return file.getvalue()


def smoothed(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return centred means over about a twentieth of the steps."""
    steps = sorted(losses)
    half = max(1, len(steps) // 40)
    means = []
    for i in range(len(steps)):
        near = [losses[s] for s in steps[max(0, i - half) : i + half + 1]]
        means.append(sum(near) / len(near))
    return steps, means


def _draw_difference(
    axes: Any, first: VariantOutcome, variant: VariantOutcome, colour: str
) -> None:
    for base, record in zip(first.records, variant.records, strict=False):
        apart = {
            step: 100 * (loss / base.losses[step] - 1)
            for step, loss in record.losses.items()
            if base.losses.get(step)
        }
        axes.plot(*smoothed(apart), "--", color=colour)


def _bars(
    axes: Any, values: Mapping[str, float], colours: Mapping[str, str], title: str, form: str
) -> None:
    bars = axes.bar(list(values), list(values.values()), color=[colours[n] for n in values])
    axes.bar_label(bars, [form.format(v) if v else "" for v in values.values()])
    axes.set_title(title, fontsize=9.5)
    axes.tick_params(axis="x", rotation=30)
    axes.spines[["top", "right"]].set_visible(False)
