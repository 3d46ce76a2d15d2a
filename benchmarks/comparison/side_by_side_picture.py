"""The picture of two precisions side by side: what was measured over the steps, and memory."""

from pathlib import Path

import matplotlib

from losses import read_losses
from side_by_side import KINDS, MIB

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

GREYS = ("0.3", "0.5", "0.65", "0.78", "0.9")
"""The greys of the kinds of memory; caches, the last kind, are not there at the peak."""
SMOOTHED = 5
"""The steps of a running mean, where there are many."""


def draw(
    folder: Path, results: dict[str, dict], measures: dict[str, str], title: str, note: str = ""
) -> None:
    """Draw the runs in `folder`/<precision>/curves.csv to `folder`/comparison.png.

    Args:
        folder: of the runs.
        results: precision -> result.json.
        measures: three or four columns of curves.csv -> label, a panel for each.
        title: of the script.
        note: what to know of the figures, below them.
    """
    curves = {name: read_losses(folder / name / "curves.csv") for name in results}
    figure, axes = plt.subplot_mosaic(
        _places(list(measures)), figsize=(12.5, 7), width_ratios=(1, 1, 0.9), layout="constrained"
    )
    for key, label in measures.items():
        for i, (precision, rows) in enumerate(curves.items()):
            _curve(axes[key], rows, key, precision, f"C{i}")
        axes[key].set(title=label, xlabel="optimizer step")
        axes[key].grid(alpha=0.3)
    axes[next(iter(measures))].legend()
    _memory(axes["memory"], results)
    first = next(iter(results.values()))
    device = "a CPU, which emulates FP8" if first["device"] == "cpu" else first["device"]
    size = max(first["parameters"].values()) / 1e6
    figure.suptitle(f"{title}, models of {size:.1f} million parameters, on {device}")
    figure.supxlabel(note, fontsize=9)
    figure.savefig(folder / "comparison.png", dpi=110)
    plt.close(figure)


def _places(keys: list[str]) -> list[list[str]]:
    """Return two rows of panels, with memory beside both; the first of three takes a row."""
    keys = keys if len(keys) == 4 else [keys[0], *keys]
    return [[*keys[:2], "memory"], [*keys[2:], "memory"]]


def _curve(axis: Axes, rows: list[dict], key: str, precision: str, colour: str) -> None:
    steps = [row["step"] for row in rows if key in row]
    values = [row[key] for row in rows if key in row]
    style = {"color": colour, "linestyle": "-" if precision == "bf16" else "--"}
    if len(values) <= 2 * SMOOTHED:
        axis.plot(steps, values, lw=2, marker="o", label=precision, **style)
        return
    axis.plot(steps, values, lw=1, alpha=0.3, **style)
    windows = [values[max(0, i - SMOOTHED + 1) : i + 1] for i in range(len(values))]
    smooth = [sum(window) / len(window) for window in windows]
    axis.plot(steps, smooth, lw=2, label=f"{precision}, mean of {SMOOTHED} steps", **style)


def _memory(axis: Axes, results: dict[str, dict]) -> None:
    names, bottom = list(results), [0.0] * len(results)
    for kind, grey in zip(KINDS[:-1], GREYS, strict=True):
        sizes = [
            sum(role[kind] for role in result["memory"].values()) / MIB
            for result in results.values()
        ]
        if not any(sizes):
            continue
        axis.bar(names, sizes, 0.55, bottom, color=grey, edgecolor="white", label=kind)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    peaks = [max(result["live"].values()) / MIB for result in results.values()]
    rest = [peak - held for peak, held in zip(peaks, bottom, strict=True)]
    axis.bar(
        names, rest, 0.55, bottom, color="none", edgecolor="0.4", hatch="//", label="other, at peak"
    )
    for x, peak in enumerate(peaks):
        axis.text(x, peak, f"{peak:.1f}", ha="center", va="bottom", fontweight="bold")
    axis.set(title="Memory at its peak, all models (MiB)", ylim=(0, max(peaks) * 1.3))
    axis.legend(fontsize=8, loc="upper right", ncols=2)
