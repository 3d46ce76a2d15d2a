"""The picture in README: losses of a fine-tuning in BF16 and FP8, and memory of a larger one.

    python -m benchmarks.overview           # runs/benchmarks/overview.png
    python -m benchmarks.overview --docs    # docs/images/overview.png

It measures nothing and draws committed files: ``benchmarks/results/fine_tuning_curves.csv``, the
losses of a fine-tuning whose script is in commit 9b7d5a8, and ``memory_counted.csv`` of
`benchmarks.bench_memory`. Needs matplotlib (torch-fp8[examples]).
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.plot import COLOURS
from benchmarks.rows import OUTPUT, RESULTS, ROOT, read_rows
from torch_fp8_tools.plan.memory_tracker import CATEGORIES

CURVES = RESULTS / "fine_tuning_curves.csv"
MEMORY = RESULTS / "memory_counted.csv"
PICTURE = ROOT / "docs" / "images" / "overview.png"
PRECISIONS = ("bf16-mixed", "fp8-mixed")
MODEL = "Llama-3.1-8B"
SHOWN = {
    "weights": "weights",
    "residuals": "residuals of weights",
    "gradients": "gradients",
    "states": "moments",
    "saved activations": "activations",
    "workspace": "workspace",
}
"""Names of the categories of memory in the picture. BF16's peak has no gradients yet, and O2's, at
the end of backward, no activations any more.
"""


def curve(rows: list[dict[str, Any]], precision: str, column: str) -> dict[int, float]:
    """Return step -> loss of the column `loss` or `eval_loss`."""
    return {
        int(row["step"]): float(row[column])
        for row in rows
        if row["precision"] == precision and row[column]
    }


def peaks(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return variant -> category -> GiB at the peak of a step of `MODEL` without checkpointing."""
    return {
        row["variant"]: {name: float(row[name]) / 1024 for name in CATEGORIES}
        for row in rows
        if (row["model"], row["checkpointing"], row["batch"]) == (MODEL, "False", "1")
    }


def saving() -> str:
    """Return the peaks in BF16 and in FP8 as text for the picture and for README."""
    bf16, fp8 = (sum(peaks(read_rows(MEMORY))[name].values()) for name in ("bf16-mixed", "O2"))
    return f"from {bf16:.0f} to {fp8:.0f} GiB"


def draw(path: Path) -> None:
    """Draw the picture from the committed CSV files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_rows(CURVES)
    figure, axes = plt.subplot_mosaic(  # in one column, which is readable on a phone
        [["losses"], ["difference"], ["memory"]],
        figsize=(6.2, 7.6),
        height_ratios=(2.2, 1, 1.3),
        layout="constrained",
    )
    _draw_losses(axes["losses"], axes["difference"], rows)
    _draw_memory(axes["memory"], peaks(read_rows(MEMORY)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None, "Description": saving()})
    plt.close(figure)


def _draw_losses(losses: Any, difference: Any, rows: list[dict[str, Any]]) -> None:
    for precision, colour, line in zip(PRECISIONS, COLOURS, ("-", "--"), strict=False):
        training, evaluation = (curve(rows, precision, name) for name in ("loss", "eval_loss"))
        losses.plot(
            *zip(*training.items(), strict=True),
            color=colour,
            ls=line,
            lw=1.2,
            alpha=0.7,
            label=f"{precision}, each step",
        )
        losses.plot(
            *zip(*evaluation.items(), strict=True),
            color=colour,
            ls=line,
            lw=2,
            marker="o",
            label=f"{precision}, evaluation",
        )
    for column, style in (("loss", {"lw": 1.2, "alpha": 0.7}), ("eval_loss", {"marker": "o"})):
        base, ours = (curve(rows, precision, column) for precision in PRECISIONS)
        percent = {step: 100 * (ours[step] / base[step] - 1) for step in base}
        difference.plot(*zip(*percent.items(), strict=True), color=COLOURS[1], **style)
    difference.axhline(0, color=COLOURS[0], lw=1)
    difference.sharex(losses)
    difference.set(xlabel="optimizer step", ylabel="FP8 against\nBF16 (%)")
    losses.set(ylabel="loss (nats per token)")
    losses.set_title(
        "Fine-tuning a Llama of 4 million parameters,\non a CPU that emulates FP8", fontsize=11
    )
    losses.legend(fontsize=10)
    for axis in (losses, difference):
        axis.grid(alpha=0.3)


def _draw_memory(axis: Any, variants: dict[str, dict[str, float]]) -> None:
    names = ["bf16-mixed", "O2"]
    left = [0.0] * len(names)
    for i, (category, shown) in enumerate(SHOWN.items()):
        widths = [variants[name][category] for name in names]
        labels = ["bf16-mixed", "fp8-mixed"]
        axis.barh(labels, widths, 0.62, left, color=COLOURS[i], label=shown)
        for y, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > 5:
                middle = start + width / 2
                axis.text(middle, y, f"{width:.0f}", ha="center", va="center", color="white")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, total in enumerate(left):
        axis.text(total, y, f" {total:.0f} GiB", ha="left", va="center", fontweight="bold")
    axis.set(xlabel="GiB at the peak of a step", xlim=(0, 1.2 * max(left)))
    axis.invert_yaxis()
    axis.set_title(f"{MODEL}, one sequence of 4,096 tokens, eager:\ncounted, not run", fontsize=11)
    axis.legend(fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true", help="draw the picture of the pages")
    arguments = parser.parse_args()
    picture = PICTURE if arguments.docs else OUTPUT / PICTURE.name
    draw(picture)
    print(f"drawn: {picture}, from {CURVES} and {MEMORY}; nothing was measured")


if __name__ == "__main__":
    main()
