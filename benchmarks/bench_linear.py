"""Forward and backward of the seven linears of a Llama-3.1-8B block, casts included.

    python benchmarks/bench_linear.py            # on a GPU; benchmarks/results/linear.csv
    python benchmarks/bench_linear.py --toy      # small sizes, also on a CPU

Every variant runs in this process, interleaved: BF16, each FP8 recipe, torchao's tensorwise and
rowwise, all eager and compiled. A variant that cannot run here has a row that says why. Rows of
linear "block" are the sums over the seven.
"""

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measurement import (
    ENVIRONMENT,
    RESULTS,
    Timing,
    default_device,
    environment,
    interleaved,
    print_table,
    write_rows,
)
from shapes import LLAMA_3_1_8B_BLOCK, TOKENS, TOY_BLOCK, TOY_TOKENS
from torch import nn

from torch_fp8 import FP8Config, convert_to_float8

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
COLUMNS = (
    "linear",
    "M",
    "K",
    "N",
    "variant",
    "mode",
    "median_ms",
    "p20_ms",
    "p80_ms",
    "tflops",
    "peak_share",
    "speedup",
    "peak_mib",
    "note",
    *ENVIRONMENT,
)
# Dense tensor core peaks in TFLOP/s, (BF16, FP8): NVIDIA H100 and H200 data sheets, SXM, half of
# the figures given "with sparsity".
PEAKS = {"H100": (989.4, 1978.9), "H200": (989.4, 1978.9)}
SAMPLES_MS = 400.0  # per variant; at least 5 repetitions, at most 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="small sizes, eager only")
    parser.add_argument("--tokens", nargs="+", type=int, help="rows M")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"))
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--csv", type=Path, default=RESULTS / "linear.csv")
    arguments = parser.parse_args()
    block = TOY_BLOCK if arguments.toy else LLAMA_3_1_8B_BLOCK
    tokens = arguments.tokens or (TOY_TOKENS if arguments.toy else TOKENS)
    modes = arguments.modes or (("eager",) if arguments.toy else ("eager", "compiled"))

    device, start, rows = default_device(), time.monotonic(), []
    about = environment(device)
    slowest = 0.0
    for num_tokens in tokens:
        began = time.monotonic()
        if began - start + slowest > arguments.budget:
            rows.append({"M": num_tokens, "note": "not reached within the budget", **about})
            continue
        measured = measure_block(block, num_tokens, arguments.recipes, modes, device)
        rows += [row | about for row in measured]
        write_rows(arguments.csv, COLUMNS, rows)
        slowest = max(slowest, time.monotonic() - began)
    write_rows(arguments.csv, COLUMNS, rows)
    totals = [row for row in rows if row.get("linear") == "block"]
    print_table(("M", "variant", "mode", "median_ms", "tflops", "speedup", "note"), totals)


def measure_block(
    block: dict[str, tuple[int, int]],
    num_tokens: int,
    recipes: list[str],
    modes: tuple[str, ...],
    device: torch.device,
) -> list[dict[str, object]]:
    """Rows for every linear and variant at M = num_tokens, and their sums over the block."""
    rows: list[dict[str, object]] = []
    by_shape: dict[tuple[int, int], list[dict[str, object]]] = {}
    for linear, shape in block.items():
        if shape not in by_shape:  # k and v, gate and up are the same GEMMs
            by_shape[shape] = list(measure_linear(*shape, num_tokens, recipes, modes, device))
        rows += [{"linear": linear, **row} for row in by_shape[shape]]
    keys = dict.fromkeys((row["variant"], row["mode"]) for row in rows)
    return rows + [_total(variant, mode, rows, num_tokens) for variant, mode in keys]


def measure_linear(
    in_features: int,
    out_features: int,
    num_tokens: int,
    recipes: list[str],
    modes: tuple[str, ...],
    device: torch.device,
) -> Iterator[dict[str, object]]:
    """A row per variant and mode for one linear."""
    torch.manual_seed(0)
    stock = nn.Linear(in_features, out_features, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(num_tokens, in_features, device=device, dtype=torch.bfloat16)
    grad = torch.randn(num_tokens, out_features, device=device, dtype=torch.bfloat16) * 1e-3
    runs: dict[str, Callable[[], None]] = {}
    notes: dict[str, str] = {}
    peaks: dict[str, float] = {}
    for name in (f"{variant}/{mode}" for variant in _variants(recipes) for mode in modes):
        variant, mode = name.split("/")
        try:
            module = _build(variant, copy.deepcopy(stock))
            run = _step(torch.compile(module) if mode == "compiled" else module, x, grad)
            peaks[name] = _peak_mib(run, device)
        except Exception as error:  # whatever a variant cannot do here becomes its row's note
            notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        else:
            runs[name] = run
    repetitions = _repetitions(runs, device)
    timings = interleaved(runs, device, repetitions)
    torch.compiler.reset()
    gc.collect()
    flops = 6 * num_tokens * in_features * out_features
    for name in runs | notes:
        variant, mode = name.split("/")
        row = {"M": num_tokens, "K": in_features, "N": out_features}
        row |= {"variant": variant, "mode": mode, "note": notes.get(name, "")}
        if name in timings:
            baseline = timings.get(f"bf16/{mode}")
            row |= _figures(timings[name], flops, variant, baseline, device)
            row["peak_mib"] = round(peaks[name], 1)
        yield row


def _variants(recipes: list[str]) -> tuple[str, ...]:
    return ("bf16", *recipes, "torchao tensorwise", "torchao rowwise")


def _build(variant: str, module: nn.Linear) -> nn.Module:
    if variant == "bf16":
        return module
    if variant.startswith("torchao "):
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except ImportError as error:
            raise ImportError("torchao is not installed") from error
        config = Float8LinearConfig.from_recipe_name(variant.removeprefix("torchao "))
        holder = nn.Sequential(module)
        return convert_to_float8_training(holder, config=config)[0]
    convert_to_float8(module, FP8Config(recipe=variant))
    return module


def _step(
    module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor
) -> Callable[[], None]:
    """One forward and backward with the gradients of input and weight."""
    leaf = x.detach().requires_grad_()
    parameters = list(module.parameters())

    def run() -> None:
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        module(leaf).backward(grad)

    return run


def _peak_mib(run: Callable[[], None], device: torch.device) -> float:
    """Peak memory of one call beyond what is there before, in MiB; 0 on the CPU."""
    run()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _repetitions(runs: dict[str, Callable[[], None]], device: torch.device) -> int:
    first = interleaved(runs, device, repetitions=1, warmup=1)
    longest = max(timing.median for timing in first.values())
    return int(min(max(SAMPLES_MS / longest, 5), 30))


def _figures(
    timing: Timing, flops: float, variant: str, baseline: Timing | None, device: torch.device
) -> dict[str, object]:
    tflops = flops / timing.median / 1e9
    return {
        "median_ms": round(timing.median, 4),
        "p20_ms": round(timing.p20, 4),
        "p80_ms": round(timing.p80, 4),
        "tflops": round(tflops, 3),
        "peak_share": _peak_share(tflops, variant, device),
        "speedup": round(baseline.median / timing.median, 3) if baseline else "",
    }


def _peak_share(tflops: float, variant: str, device: torch.device) -> object:
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    peak = next((peaks[variant != "bf16"] for card, peaks in PEAKS.items() if card in name), None)
    return round(tflops / peak, 3) if peak else ""


def _total(
    variant: object, mode: object, rows: list[dict[str, object]], num_tokens: int
) -> dict[str, object]:
    """The sum of the medians over the linears, and the speed-up over BF16 in the same mode."""

    def medians(name: object) -> list[float]:
        found = [row for row in rows if (row["variant"], row["mode"]) == (name, mode)]
        return [row["median_ms"] for row in found if "median_ms" in row]

    total = {"linear": "block", "M": num_tokens, "variant": variant, "mode": mode}
    mine, baseline = medians(variant), medians("bf16")
    missing = next((row["note"] for row in rows if row["variant"] == variant and row["note"]), "")
    num_linears = len({row["linear"] for row in rows})
    if len(mine) < num_linears:
        return total | {"note": missing}
    flops = sum(6 * num_tokens * k * n for k, n in _shapes(rows))
    total |= {"median_ms": round(sum(mine), 4), "tflops": round(flops / sum(mine) / 1e9, 3)}
    if len(baseline) == num_linears:
        total["speedup"] = round(sum(baseline) / sum(mine), 3)
    return total


def _shapes(rows: list[dict[str, object]]) -> list[tuple[int, int]]:
    return list({row["linear"]: (row["K"], row["N"]) for row in rows}.values())


if __name__ == "__main__":
    main()
