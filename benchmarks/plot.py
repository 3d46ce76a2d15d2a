"""A picture of each benchmark from its CSV.

    python -m benchmarks.plot benchmarks/results/linear.csv ...     # linear.png beside it

Benchmarks draw theirs when they end. Needs matplotlib (torch-fp8[examples]); without it the CSV is
all there is.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.measurement import read_rows
from benchmarks.memory_tracker import CATEGORIES

Rows = list[dict[str, Any]]


def draw(path: Path) -> Path | None:
    """Draw the picture of a benchmark's CSV beside it.

    Args:
        path: of a CSV with the name of one in `PICTURES`.
    Returns:
        the path of the PNG; None, with a line printed, where it was not drawn.
    """
    try:
        import matplotlib
    except ImportError:
        print(f"no picture of {path.name}: install torch-fp8[examples] for matplotlib")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    title, panels = PICTURES[path.stem]
    rows = read_rows(path)
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 5), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        panel(axis, rows)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    cards = sorted({row["gpu"] for row in rows if row.get("gpu")})
    figure.suptitle(f"{title} ({', '.join(cards)})" if cards else title)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    print(f"drawn: {target}")
    return target


def lines(
    x: str,
    y: str,
    series: tuple[str, ...],
    keep: Callable[[dict[str, Any]], bool] = lambda row: True,
    *,
    title: str = "",
    log_y: bool = False,
) -> Callable[[Any, Rows], None]:
    """A panel with a line per distinct value of the columns `series`."""

    def panel(axis: Any, rows: Rows) -> None:
        points: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if keep(row) and row.get(x) and row.get(y):
                name = ", ".join(row[column] for column in series if row[column])
                points.setdefault(name, []).append((float(row[x]), float(row[y])))
        for i, (name, line) in enumerate(points.items()):
            style = ("-", "--", ":")[i // 10 % 3]  # there are ten colours
            axis.plot(*zip(*sorted(line), strict=True), marker="o", linestyle=style, label=name)
        axis.set(xlabel=x, ylabel=y, xscale="log", title=title)
        if log_y and points:
            axis.set_yscale("log")

    return panel


def bars(
    y: Iterable[str],
    names: tuple[str, ...],
    keep: Callable[[dict[str, Any]], bool] = lambda row: True,
    *,
    label: str = "",
    scale: float = 1.0,
    limit: float | None = None,
) -> Callable[[Any, Rows], None]:
    """A panel with a horizontal bar per row, the columns `y` stacked.

    Args:
        y: columns.
        names: columns that name a bar.
        keep: which rows.
        label: of the axis; the column's name where there is one.
        scale: that values are multiplied by.
        limit: drawn as a line, where the bars come near it.
    """
    y = tuple(y)

    def panel(axis: Any, rows: Rows) -> None:
        kept = [row for row in rows if keep(row) and any(row.get(column) for column in y)]
        labels = [", ".join(row[c] for c in names if row.get(c)) for row in kept]
        left = [0.0] * len(kept)
        for column in y:
            values = [scale * float(row.get(column) or 0) for row in kept]
            # By position: two rows may have one name.
            axis.barh(range(len(kept)), values, left=left, label=column if len(y) > 1 else None)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axis.set_yticks(range(len(kept)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(label or ", ".join(y))
        if limit is not None and max(left, default=0.0) > limit / 2:
            axis.axvline(limit, color="black", linestyle="--")

    return panel


def _is(**wanted: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: all(row.get(column) == value for column, value in wanted.items())


_MEMORY = bars(
    CATEGORIES,
    ("model", "variant", "checkpointing", "batch"),
    label="GiB; dashed: 80",
    scale=1 / 1024,
    limit=80.0,
)

PICTURES: dict[str, tuple[str, list[Callable[[Any, Rows], None]]]] = {
    "roofline": (
        "Ceilings of the speed-up over BF16, seven linears of a Llama-3.1-8B block: a model",
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
                title="fprop of gate_proj",
            ),
            lines("contracted", "error", ("variant", "input"), _is(gemm="contraction"), log_y=True),
        ],
    ),
    "linear": (
        "Linears of a Llama-3.1-8B block, forward and backward with casts: speed-up over BF16",
        [
            lines("M", "speedup", ("variant", "mode"), _is(linear=linear), title=linear)
            for linear in ("together", "chain")
        ],
    ),
    "block": (
        "A Llama-3.1-8B decoder layer, forward and backward",
        [
            bars(["median_ms"], ("variant", "mode", "batch")),
            bars(["saved_bytes_per_token"], ("variant", "mode", "batch")),
        ],
    ),
    "step": (
        "Training steps",
        [
            bars(["tokens_per_s"], ("model", "host", "variant", "mode", "batch")),
            bars(["peak_mib"], ("model", "host", "variant", "mode", "batch"), scale=1 / 1024),
        ],
    ),
    "memory": ("Peak memory of a training step by category", [_MEMORY]),
    "memory_counted": ("Peak memory of a training step by category, counted, not run", [_MEMORY]),
    "optimizer": (
        "One optimizer step on a billion parameters",
        [bars(["median_ms"], ("variant",)), bars(["host_ms"], ("variant",))],
    ),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("csv", nargs="+", type=Path, help="CSV files of benchmarks")
    for path in arguments.parse_args().csv:
        draw(path)


if __name__ == "__main__":
    main()
