"""The largest model that a cluster can train, and FP8-LM's published memory and the planner's.

    python -m benchmarks.evidence.largest_model  # runs/benchmarks/largest_model.csv, .png
    python -m benchmarks.evidence.largest_model --published  # runs/benchmarks/published_memory.csv

* ``largest_model``: FP8-LM's Figure 1 (arXiv 2310.18313): GPTs of n layers, n heads and 128 n
  features on 8, 32 and 128 GPUs of 80 GB, all of which shard by FSDP2, sequences of 2,048, one at a
  time, with activation checkpointing. The row of FP8-LM is arithmetic: six bytes per parameter
  (master weight 2, gradient 1, moments 1 and 2: its equation for the FP8 optimizer), and what BF16
  holds within a step times 18.33 / 22.66, Transformer Engine's share of the activations as COAT
  counts it (arXiv 2410.19313), because FP8-LM's linears are Transformer Engine's.
* ``published_memory``: GPT-7B, 13B and 175B as FP8-LM trained them, without activation
  checkpointing. Megatron's distributed optimizer (ZeRO-1) shards only the states, which this
  package does not do: the prediction takes the planner's activations and adds the standing bytes of
  that scheme, 2 for a weight and 4 for its float32 gradient on every GPU, 12 over the replicas. The
  last column plans the same run under FSDP2.

Nothing runs on a GPU: bytes are counted on the meta device.
"""

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from benchmarks.measurement import Table, environment, print_table
from benchmarks.rows import OUTPUT, RESULTS, read_rows
from torch_fp8_tools.plan.layouts import PRESETS
from torch_fp8_tools.plan.plan import left_of, plan
from torch_fp8_tools.plan.setup import BF16

COLUMNS = ("gpus", "method", "layers", "billion_parameters", "peak_gib")
PUBLISHED_COLUMNS = (
    *("model", "gpus", "tensor", "micro_batch", "published_bf16_gb"),
    *("predicted_bf16_gb", "fsdp_bf16_gb", "published_fp8_lm_gb", "fsdp_o3_gb"),
)
# (model, GPUs, tensor, micro-batch, BF16 GB, FP8-LM GB): FP8-LM's table of throughput
# and memory, second version; degrees of the scripts in Azure/MS-AMP-Examples, gpt3.
PUBLISHED = (
    ("gpt-7b", 32, 1, 2, 69.6, 49.4),
    ("gpt-13b", 32, 2, 2, 68.2, 48.9),
)
FP8_LM = "FP8-LM"
METHODS = (BF16, FP8_LM, "O1", "O2", "O3")
_FP8_LM_STATES, _FP8_LM_GRADIENT, _BF16_GRADIENT = 5.0, 1.0, 4.0
_FP8_LM_ACTIVATIONS = 18.33 / 22.66
_MOST_LAYERS, _STEP = 400, 4
_TICKS = [m * 10.0**e for e in range(-2, 4) for m in (1, 3)]


class Largest(NamedTuple):
    """The largest model of a method on some GPUs, or None if the smallest does not fit."""

    gpus: int
    method: str
    layers: int | None
    parameters: int
    peak: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", action="store_true", help="FP8-LM's memory instead")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    text = "of the rows and the picture; benchmarks/results has those that are committed"
    parser.add_argument("--folder", type=Path, default=OUTPUT, help=text)
    arguments = parser.parse_args()
    about = environment(torch.device("cpu"))
    if arguments.published:
        path = arguments.folder / "published_memory.csv"
        table = Table(path, PUBLISHED_COLUMNS, ("model",), about)
        for case in PUBLISHED:
            table.add([published_row(*case)])
        print_table(PUBLISHED_COLUMNS, table.rows)
        return
    path = arguments.folder / "largest_model.csv"
    table = Table(path, COLUMNS, ("gpus", "method"), about)
    for gpus in arguments.gpus:
        rows = figure((gpus,), arguments.methods, progress=print)
        table.add(
            [
                {
                    "gpus": row.gpus,
                    "method": row.method,
                    "layers": row.layers,
                    "billion_parameters": round(row.parameters / 1e9, 2),
                    "peak_gib": round(row.peak / 2**30, 2),
                }
                for row in rows
            ]
        )
    draw(drawn(read_rows(path)), path.with_suffix(".png"))
    print_table(COLUMNS, table.rows)


def drawn(rows: list[dict[str, str]]) -> list[Largest]:
    """Return the rows of the CSV in the figure's order."""
    ordered = sorted(rows, key=lambda row: (int(row["gpus"]), METHODS.index(row["method"])))
    return [
        Largest(
            int(row["gpus"]),
            row["method"],
            int(row["layers"]),
            int(float(row["billion_parameters"]) * 1e9),
            int(float(row["peak_gib"]) * 2**30),
        )
        for row in ordered
    ]


def published_row(
    model: str, gpus: int, tensor: int, micro_batch: int, bf16: float, fp8_lm: float
) -> dict[str, Any]:
    """Return the published and the predicted gigabytes of a run."""
    options = {
        "gpus": gpus,
        "tensor": tensor,
        "micro_batch": micro_batch,
        "sequence": 2048,
        "levels": ("bf16-mixed", "O3"),
    }
    sharded = plan(model, **options)
    replicas = gpus // tensor
    alone = plan(model, **{**options, "gpus": tensor, "levels": ("bf16-mixed",)})
    needed = alone.levels["bf16-mixed"]
    elements = needed.bytes["weights"] / 4
    # BF16 weights need no casts for autocast, which the planner's activations hold for all linears
    activations = needed.bytes["activations"] - 2 * elements
    zero_1 = elements * (2 + 4 + 12 / replicas) + activations
    return {
        "model": model,
        "gpus": gpus,
        "tensor": tensor,
        "micro_batch": micro_batch,
        "published_bf16_gb": bf16,
        "predicted_bf16_gb": round(zero_1 / 1e9, 1),
        "fsdp_bf16_gb": round(sharded.levels["bf16-mixed"].peak / 1e9, 1),
        "published_fp8_lm_gb": fp8_lm,
        "fsdp_o3_gb": round(sharded.levels["O3"].peak / 1e9, 1),
    }


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
        methods: keys of `METHODS`.
        progress: function that is called with each tried size.
        options: see `torch_fp8.plan`.
    """
    options = {"sequence": 2048, "checkpointing": True, **options}
    return [_largest(n, method, progress, options) for n in gpus for method in methods]


def draw(rows: Sequence[Largest], path: Path) -> None:
    """Draw the figure into a PNG."""
    plt = importlib.import_module("matplotlib.figure")
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
    """Search outward from the last result, then bisect: a model fits if a larger one does."""
    best = Largest(gpus, method, None, 0, 0)
    low, high, away = 0, _MOST_LAYERS // _STEP + 1, 1
    tried = _found_last(gpus, method) // _STEP
    while high - low > 1:
        tried = tried if low < tried < high else (low + high) // 2
        layers = tried * _STEP
        progress(f"{method}, {gpus} GPUs: {layers} layers")
        peak, parameters, fits = _needs(layers, gpus, method, options)
        if fits:
            best, low, tried = Largest(gpus, method, layers, parameters, peak), tried, tried + away
        else:
            high, tried = tried, tried - away
        away *= 2
    return best


def _found_last(gpus: int, method: str) -> int:
    """Return the layers of a committed row; 0 if there is none."""
    rows = read_rows(RESULTS / "largest_model.csv")
    found = [r["layers"] for r in rows if (r["gpus"], r["method"]) == (str(gpus), method)]
    return int(found[0]) if found else 0


def _gpt(layers: int) -> Any:
    """Return the configuration of a GPT of n layers, n heads and 128 n features."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": layers}
    sizes |= {"hidden_size": 128 * layers, "intermediate_size": 512 * layers}
    return AutoConfig.for_model(**PRESETS["gpt-7b"] | sizes)


def _needs(layers: int, gpus: int, method: str, options: dict[str, Any]) -> tuple[int, int, bool]:
    """Return peak, parameters, and whether they fit."""
    level = BF16 if method == FP8_LM else method
    made = plan(_gpt(layers), levels=(level,), gpus=gpus, **options)
    needed = made.levels[level]
    if method != FP8_LM:
        return needed.peak, made.num_params, needed.fits
    each = made.num_params / gpus
    forward = needed.bytes["activations"]
    states = sum(needed.bytes[name] for name in ("weights", "moments"))
    of_step = max(forward, needed.peak - states)  # in backward with the gradients, float32
    backward = _FP8_LM_ACTIVATIONS * (of_step - _BF16_GRADIENT * each) + _FP8_LM_GRADIENT * each
    peak = _FP8_LM_STATES * each + max(_FP8_LM_ACTIVATIONS * forward, backward)
    return round(peak), made.num_params, left_of(made.setup.memory * 2**30, peak) >= 0


if __name__ == "__main__":
    main()
