"""The picture of a comparison: losses, their difference, and memory."""

from pathlib import Path

import matplotlib

from losses import read_losses

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

KINDS = {
    "weights": ("weights", "0.35"),
    "gradients": ("gradients", "0.6"),
    "optimizer": ("optimizer state", "0.8"),
}
"""The kinds of memory: (label, grey); colours are those of the runs."""


def draw(results: dict[str, dict], folder: Path, path: Path, title: str) -> None:
    """Draw the runs in `folder`/<precision>/losses.csv.

    Args:
        results: precision -> result.json; the others are compared to the first.
        folder: of the runs.
        path: of the PNG.
        title: what is trained on what.
    """
    curves = {name: read_losses(folder / name / "losses.csv") for name in results}
    figure, axes = plt.subplot_mosaic(
        [["losses", "memory"], ["difference", "memory"]],
        figsize=(11, 6.5),
        width_ratios=(2.4, 1),
        height_ratios=(2, 1),
        layout="constrained",
    )
    _losses(axes["losses"], curves)
    _difference(axes["difference"], curves)
    axes["difference"].sharex(axes["losses"])
    _memory(axes["memory"], results)
    first = next(iter(results.values()))
    size = f", {first['parameters'] / 1e6:.1f} million parameters" if "parameters" in first else ""
    device = "a CPU, which emulates FP8" if first["device"] == "cpu" else first["device"]
    figure.suptitle(f"Fine-tuning of {title}{size}\non {device}" if title else "Fine-tuning")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _points(rows: list[dict], key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in rows if key in row}


def _losses(axis: Axes, curves: dict[str, list[dict]]) -> None:
    for i, (precision, rows) in enumerate(curves.items()):
        style = {"color": f"C{i}", "linestyle": "--" if i else "-"}
        training, evaluation = _points(rows, "loss"), _points(rows, "eval_loss")
        axis.plot(
            *_xy(training), lw=1, alpha=0.45, label=f"{precision}, training (one batch)", **style
        )
        axis.plot(*_xy(evaluation), lw=2, marker="o", label=f"{precision}, evaluation", **style)
    axis.set(ylabel="loss (nats per answer token)")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def _difference(axis: Axes, curves: dict[str, list[dict]]) -> None:
    reference, *others = curves
    for i, name in enumerate(others, start=1):
        for key, style in (
            ("loss", {"lw": 1, "alpha": 0.45}),
            ("eval_loss", {"lw": 2, "marker": "o"}),
        ):
            base, other = _points(curves[reference], key), _points(curves[name], key)
            percent = {step: 100 * (other[step] / base[step] - 1) for step in base & other.keys()}
            kind = "training" if key == "loss" else "evaluation"
            axis.plot(*_xy(percent), color=f"C{i}", label=f"{name}, {kind}", **style)
    axis.axhline(0, color="C0", lw=1)
    axis.set(xlabel="optimizer step", ylabel=f"loss against\n{reference} (%)")
    axis.grid(alpha=0.3)


def _memory(axis: Axes, results: dict[str, dict]) -> None:
    names = list(results)
    bottom = [0.0] * len(names)
    for kind, (label, grey) in KINDS.items():
        heights = [results[name].get("bytes_by_kind", {}).get(kind, 0.0) for name in names]
        axis.bar(names, heights, 0.6, bottom, color=grey, edgecolor="white", label=label)
        for x, (start, height) in enumerate(zip(bottom, heights, strict=True)):
            if height >= 0.8:
                colour = "white" if grey < "0.5" else "black"
                text = f"{height:.2g}"
                axis.text(x, start + height / 2, text, ha="center", va="center", color=colour)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for x, name in enumerate(names):
        total = results[name]["bytes_per_parameter"]
        axis.text(x, total, f"{total:.2f}", ha="center", va="bottom", fontweight="bold")
    axis.set(ylabel="bytes per parameter", title="Memory, without activations", ylim=(0, 18.5))
    axis.legend(fontsize=8, loc="upper right")


def _xy(points: dict[int, float]) -> tuple[list[int], list[float]]:
    return sorted(points), [points[step] for step in sorted(points)]
