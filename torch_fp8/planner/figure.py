"""FP8-LM's Figure 1: the largest model that so many GPUs can train (arXiv 2310.18313).

Models are GPTs of n layers, n heads and 128 n features, the rule that GPT-7B (32), 13B (40) and
175B (96) follow; all GPUs shard by FSDP2. The row of FP8-LM is arithmetic: six bytes per parameter
(master weight 2, gradient 1, moments 1 and 2: its equation for the FP8 optimizer), and what BF16
holds within a step times 18.33 / 22.66, Transformer Engine's share of the activations as COAT
counts it (arXiv 2410.19313), for FP8-LM's linears are Transformer Engine's.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_fp8.planner.layouts import gpt_config
from torch_fp8.planner.plan import RESERVE, plan
from torch_fp8.planner.setup import BF16

FP8_LM = "FP8-LM"
METHODS = (BF16, FP8_LM, "O1", "O2", "O3")
_FP8_LM_STATES, _FP8_LM_GRADIENT, _BF16_GRADIENT = 5.0, 1.0, 4.0
_FP8_LM_ACTIVATIONS = 18.33 / 22.66
_MOST_LAYERS, _STEP = 400, 4
_TICKS = [m * 10.0**e for e in range(-2, 4) for m in (1, 3)]


class Largest(NamedTuple):
    """The largest model of a method on some GPUs; None where the smallest does not fit."""

    gpus: int
    method: str
    layers: int | None
    parameters: int
    peak: int


def figure(
    gpus: Sequence[int] = (8, 32, 128),
    methods: Sequence[str] = METHODS,
    *,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Largest]:
    """Find the largest model for each number of GPUs and method.

    Args:
        gpus: the numbers of GPUs.
        methods: of `METHODS`.
        progress: called with what is tried.
        options: see `torch_fp8.plan`.
    """
    options = {"sequence": 2048, "checkpointing": True, **options}
    return [_largest(n, method, progress, options) for n in gpus for method in methods]


def draw(rows: Sequence[Largest], path: Path) -> None:
    """Draw the figure into a PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        plt = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("--plot draws with matplotlib: pip install matplotlib") from error
    drawn = plt.Figure(figsize=(7, 3.6), layout="constrained")
    axes = drawn.subplots()
    counts = list(dict.fromkeys(row.gpus for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    colours = {BF16: "0.6", FP8_LM: "tab:orange", "O1": "#a6cee3", "O2": "#4a90c4", "O3": "#08519c"}
    width = 0.8 / len(methods)
    found = [row.parameters / 1e9 for row in rows if row.parameters]
    low, high = min(found, default=1.0), max(found, default=1.0)
    for i, method in enumerate(methods):
        of_method = [row for row in rows if row.method == method]
        shift = (i - (len(methods) - 1) / 2) * width
        places = [counts.index(row.gpus) + shift for row in of_method]
        sizes = [row.parameters / 1e9 for row in of_method]
        bars = axes.bar(places, sizes, 0.92 * width, label=method, color=colours[method])
        axes.bar_label(bars, [f"{size:.0f}" for size in sizes], fontsize=7)
    axes.set_xticks(range(len(counts)), [f"{n} GPUs" for n in counts])
    axes.set_yscale("log")
    axes.set_yticks([n for n in _TICKS if low / 2 <= n <= high * 2], minor=False)
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.yaxis.set_minor_locator(importlib.import_module("matplotlib.ticker").NullLocator())
    axes.set_ylabel("largest model, billion parameters")
    axes.set_ylim(low / 1.5, high * 1.8)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    drawn.savefig(path, dpi=150, format="png")


def _largest(
    gpus: int, method: str, progress: Callable[[str], None], options: dict[str, Any]
) -> Largest:
    """Search by halves: whether a model fits falls with its size."""
    best = Largest(gpus, method, None, 0, 0)
    low, high = 1, _MOST_LAYERS // _STEP
    while low <= high:
        middle = (low + high) // 2
        layers = middle * _STEP
        progress(f"{method}, {gpus} GPUs: {layers} layers")
        peak, parameters, fits = _needs(layers, gpus, method, options)
        if fits:
            best, low = Largest(gpus, method, layers, parameters, peak), middle + 1
        else:
            high = middle - 1
    return best


def _needs(layers: int, gpus: int, method: str, options: dict[str, Any]) -> tuple[int, int, bool]:
    """Return peak, parameters, and whether they fit."""
    level = BF16 if method == FP8_LM else method
    made = plan(gpt_config(layers), levels=(level,), gpus=gpus, **options)
    needed = made.levels[level]
    if method != FP8_LM:
        return needed.peak, made.num_params, needed.fits
    each = made.num_params / gpus
    forward = needed.bytes["activations"]
    states = sum(needed.bytes[name] for name in ("weights", "moments"))
    of_step = max(forward, needed.peak - states)  # in backward with the gradients, float32
    backward = _FP8_LM_ACTIVATIONS * (of_step - _BF16_GRADIENT * each) + _FP8_LM_GRADIENT * each
    peak = _FP8_LM_STATES * each + max(_FP8_LM_ACTIVATIONS * forward, backward)
    return round(peak), made.num_params, peak + RESERVE <= made.setup.memory * 2**30
