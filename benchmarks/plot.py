"""A picture of each benchmark, drawn from its CSV.

    python -m benchmarks.plot benchmarks/results/linear.csv ...     # linear.png in the same folder

Benchmarks draw their picture when they end, if matplotlib is installed (torch-fp8[examples]). A
panel has at most eight lines, each with its own colour and mark. More variants are split into a
panel for each family, all with the same BF16.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.labels import AXES, label, words
from benchmarks.measurement import read_rows
from torch_fp8_tools.plan.memory_tracker import CATEGORIES

Rows = list[dict[str, Any]]
Lines = dict[str, list[tuple[float, float]]]
Keep = Callable[[dict[str, Any]], bool]

# Okabe and Ito's colours, which colour-blind readers can tell apart; https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKS = "os^Dv<>P"
FAMILIES = (
    ("ours", lambda name: not name.startswith(("torchao", "Transformer Engine"))),
    ("torchao and Transformer Engine", lambda name: name.startswith(("torchao", "Transformer"))),
)
BARS = 24
"""The most bars in a panel."""
SAME = 0.005
"""The relative difference up to which two lines count as one."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: what distinguishes the panel from the others.
        draw: function of the axes and the rows.
        height: number of bars that set the height, or 0 for the usual height.
        key: panels with the same key share the limits of their values.
    """

    title: str
    draw: Callable[[Any, Rows], None]
    height: int = 0
    key: str = ""


Panels = Callable[[Rows], Iterator[Panel]]


def draw(path: Path) -> Path | None:
    """Draw the picture of a benchmark's CSV into the same folder.

    Args:
        path: path of a CSV whose name is in `PICTURES`.
    Returns:
        the path of the PNG, or None if it was not drawn, for a printed reason.
    """
    if path.stem not in PICTURES:
        print(f"no picture of {path.name}: there are pictures of {', '.join(PICTURES)}")
        return None
    try:
        import matplotlib
    except ImportError:
        print(f"no picture of {path.name}: install torch-fp8[examples] for matplotlib")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    title, kinds = PICTURES[path.stem]
    rows = read_rows(path)
    panels = [panel for kind in kinds for panel in kind(rows)]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    height = max(5.0, *(1.4 + 0.3 * panel.height for panel in panels))
    figure, axes = plt.subplots(
        lines, columns, figsize=(7.5 * columns, height * lines), squeeze=False, layout="constrained"
    )
    shared: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        if panel.key and shared.setdefault(panel.key, axis) is not axis:
            axis.sharey(shared[panel.key])
        panel.draw(axis, rows)
        axis.set_title(panel.title, fontsize=11)
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    legends: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        handles, names = axis.get_legend_handles_labels()
        if panel.key and names:
            axis.legend(fontsize=8)
        else:  # the same in all panels
            legends |= dict(zip(names, handles, strict=True))
    if legends:
        figure.legend(legends.values(), legends, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle("\n".join([title, *_where(rows)]))
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    print(f"drawn: {target}")
    return target


def lines(
    x: str,
    y: str,
    series: tuple[str, ...],
    keep: Keep = lambda row: True,
    *,
    title: str = "",
    log_y: bool = False,
) -> Panels:
    """Return panels with a line per distinct value of the columns `series`, eight at most in
    each.
    """

    def panels(rows: Rows) -> Iterator[Panel]:
        kept = [row for row in rows if keep(row) and row.get(x) and row.get(y)]
        points: Lines = {}
        for row in kept:
            points.setdefault(label(row, series), []).append((float(row[x]), float(row[y])))
        points = {name: sorted(line) for name, line in points.items()}
        for family, part in _in_families(points):
            shown = ", ".join(filter(None, (title, family)))
            yield Panel(shown, _lines(x, y, part, log_y), key=f"{y} {log_y}")

    return panels


def _in_families(points: Lines) -> Iterator[tuple[str, Lines]]:
    """Yield all lines in one panel, or eight at most of each family; BF16 is in all."""
    merged = _merged(points)
    if len(merged) <= len(COLOURS):
        yield "", merged
        return
    everywhere = [name for name in points if name.startswith("BF16")][:2]
    room = len(COLOURS) - len(everywhere)
    for family, belongs in FAMILIES:
        members = [name for name in points if belongs(name) and name not in everywhere]
        merged = _merged({name: points[name] for name in members})
        count = -(-len(merged) // room)
        for i in range(count):
            number = f" ({i + 1} of {count})" if count > 1 else ""
            start, end = (len(merged) * j // count for j in (i, i + 1))
            part = dict(list(merged.items())[start:end])
            yield family + number, {name: points[name] for name in everywhere} | part


def _merged(points: Lines) -> Lines:
    """Merge lines that coincide into one with the names of all."""
    merged: list[tuple[list[str], list[tuple[float, float]]]] = []
    for name, line in points.items():
        for names, other in merged:
            if _alike(line, other):
                names.append(name)
                break
        else:
            merged.append(([name], line))
    return {"\n= ".join(names): line for names, line in merged}


def _alike(line: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    return len(line) == len(other) and all(
        a == b and math.isclose(c, d, rel_tol=SAME)
        for (a, c), (b, d) in zip(line, other, strict=True)
    )


def _lines(x: str, y: str, points: Lines, log_y: bool) -> Callable[[Any, Rows], None]:
    def plot(axis: Any, rows: Rows) -> None:
        for (name, line), colour, mark in zip(points.items(), COLOURS, MARKS, strict=False):
            axis.plot(*zip(*line, strict=True), color=colour, marker=mark, ms=5, label=name)
        axis.set(xlabel=AXES[x], ylabel=AXES[y])
        if points:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axis.set_yscale("log" if log_y else "linear")

    return plot


def bars(
    y: Iterable[str],
    names: tuple[str, ...],
    keep: Keep = lambda row: True,
    *,
    by: str = "",
    axis_label: str = "",
    scale: float = 1.0,
    limit: float | None = None,
    title: str = "",
) -> Panels:
    """Return panels of horizontal bars, the columns `y` stacked, one panel for each value of `by`.

    Args:
        y: columns.
        names: columns that name a bar.
        keep: which rows.
        by: column, or empty for all rows in one panel.
        axis_label: label with the unit, or None if the only column has one in `AXES`.
        scale: factor of the values.
        limit: drawn as a line, where the bars come near it.
        title: title of the panels, before the value of `by`.
    """
    y = tuple(y)

    def panels(rows: Rows) -> Iterator[Panel]:
        kept = [row for row in rows if keep(row) and any(row.get(column) for column in y)]
        groups: dict[str, Rows] = {}
        for row in kept:
            groups.setdefault(str(row.get(by) or ""), []).append(row)
        for value, group in (groups or {"": []}).items():
            for i in range(0, max(1, len(group)), BARS):
                part = group[i : i + BARS]
                shown = ", ".join(filter(None, (title, words(value))))
                yield Panel(shown, plot(part), height=len(part))

    def plot(part: Rows) -> Callable[[Any, Rows], None]:
        def on(axis: Any, _: Rows) -> None:
            left = [0.0] * len(part)
            for column, colour in zip(y, COLOURS, strict=False):
                values = [scale * float(row.get(column) or 0) for row in part]
                # By position: two rows may have one name.
                name = words(column) if len(y) > 1 else None
                axis.barh(range(len(part)), values, left=left, color=colour, label=name)
                left = [a + b for a, b in zip(left, values, strict=True)]
            for i, total in enumerate(left):
                text = f"{total:,.0f}" if total >= 100 else f"{total:.3g}"
                axis.text(total, i, f" {text}", va="center", fontsize=7)
            axis.set_yticks(range(len(part)), [label(row, names) for row in part], fontsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.16)
            axis.set_xlabel(axis_label or AXES[y[0]])
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
            if limit is not None and max(left, default=0.0) > limit / 2:
                axis.axvline(limit, color="black", linestyle="--", label=f"{limit:.0f} GiB")

        return on

    return panels


def differences(group: str) -> Panels:
    """Return a panel with a run's difference from BF16: mean over models, error, and each model.

    Args:
        group: value of the rows' column ``group``.
    """

    def panels(rows: Rows) -> Iterator[Panel]:
        values: dict[str, dict[str, list[float]]] = {}
        models = list(dict.fromkeys(row["model"] for row in rows))
        for row in rows:
            if row["group"] == group and row["run"] != "bf16":
                of_run = values.setdefault(row["run"], {})
                of_run.setdefault(row["model"], []).append(100 * float(row["rel_diff"]))
        if values:
            yield Panel(group, functools.partial(plot, values, models), height=len(values))

    def plot(
        values: dict[str, dict[str, list[float]]], models: list[str], axis: Any, _: Rows
    ) -> None:
        for i, of_run in enumerate(values.values()):
            means = [statistics.mean(seeds) for seeds in of_run.values()]
            spreads = [statistics.variance(v) / len(v) for v in of_run.values() if len(v) > 1]
            mean, error = statistics.mean(means), math.sqrt(sum(spreads)) / len(means)
            axis.barh(i, mean, xerr=error, color=COLOURS[5], capsize=3)
            for model, value in zip(of_run, means, strict=True):
                j = models.index(model)
                style = {"color": COLOURS[j], "marker": MARKS[j], "linestyle": "", "ms": 4}
                axis.plot(value, i, label=model, **style)
        axis.set_yticks(range(len(values)), list(values), fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("loss above BF16's (%)")

    return panels


def _is(**wanted: str) -> Keep:
    return lambda row: all(row.get(column) == value for column, value in wanted.items())


def _where(rows: Rows) -> list[str]:
    """Return a line with the card and the versions of the rows."""
    cards = sorted({row["gpu"] for row in rows if row.get("gpu")})
    versions = sorted({f"torch {row['torch']}" for row in rows if row.get("torch")})
    real = [card for card in cards if not card.startswith("none")]
    words = [*(real or (["on a CPU"] if cards else [])), *versions]
    return [", ".join(words)] if words else []


def _memory(title: str) -> tuple[str, list[Panels]]:
    shown = ("variant", "checkpointing", "batch")
    label, scale = "memory at the peak (GiB)", 1 / 1024
    panel = bars(CATEGORIES, shown, by="model", axis_label=label, scale=scale, limit=80.0)
    return title, [panel]


PICTURES: dict[str, tuple[str, list[Panels]]] = {
    "roofline": (
        "How fast the seven linears of a Llama-3.1-8B block can be, forward and backward: a model "
        "on paper, not measured",
        [
            lines(
                "M",
                "ceiling",
                ("method",),
                _is(card=card, linears="seven, inputs shared"),
                title=card,
            )
            for card in ("H100", "H200")
        ],
    ),
    "gemm": (
        "GEMMs of a Llama-3.1-8B block, without casts",
        [
            lines(
                "M",
                "tflops",
                ("variant",),
                _is(gemm="fprop", K="4096", N="14336"),
                title="Speed: forward GEMM of gate_proj",
            ),
            lines(
                "contracted",
                "error",
                ("variant", "input"),
                _is(gemm="contraction"),
                title="Error against float64",
                log_y=True,
            ),
        ],
    ),
    "linear": (
        "The seven linears of a Llama-3.1-8B block, forward and backward with casts",
        [
            lines("M", "speedup", ("variant", "mode"), _is(linear=linear), title=title)
            for linear, title in (
                ("together", "linears alone"),
                ("chain", "with norms and SwiGLU between them"),
            )
        ],
    ),
    "block": (
        "A Llama-3.1-8B decoder layer, forward and backward, sequences of 4,096 tokens",
        [
            bars(["median_ms"], ("variant", "mode", "batch"), title="Time"),
            bars(["saved_bytes_per_token"], ("variant", "mode", "batch"), title="Memory"),
        ],
    ),
    "step": (
        "Fine-tuning steps, sequences of 4,096 tokens",
        [
            bars(
                [column],
                ("variant", "host", "mode", "batch"),
                by="model",
                title=title,
                scale=scale,
            )
            for column, title, scale in (
                ("tokens_per_s", "Speed", 1.0),
                ("peak_mib", "Peak memory", 1 / 1024),
            )
        ],
    ),
    "memory": _memory("Peak memory of a fine-tuning step, sequences of 4,096 tokens"),
    "memory_counted": _memory(
        "Peak memory of a fine-tuning step, sequences of 4,096 tokens: counted, not run"
    ),
    "optimizer": (
        "One AdamW step on a billion parameters",
        [
            bars(["median_ms"], ("variant",), title="On the card"),
            bars(["host_ms"], ("variant",), title="On the host"),
        ],
    ),
    "loss_split": (
        "Which rounding costs how much loss: six small models after 30 steps, paired seeds; bars: "
        "mean of the models",
        [
            differences(group)
            for group in (
                *("reference", "one rounding alone", "all but one rounding", "where it rounds"),
                *("how it rounds", "the field", "the last steps' forward in BF16"),
                *("values in BF16", "cures"),
            )
        ],
    ),
    "loss_curves": (
        "A Llama of 127 million parameters from scratch, the same tokens in the same order",
        [lines("step", "loss", ("variant",))],
    ),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("csv", nargs="+", type=Path, help="CSV files of benchmarks")
    for path in arguments.parse_args().csv:
        draw(path)


if __name__ == "__main__":
    main()
