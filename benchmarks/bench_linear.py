"""Forward and backward of the seven linears of a Llama-3.1-8B block, casts included.

    python -m benchmarks.bench_linear            # on a GPU; runs/benchmarks/linear.csv
    python -m benchmarks.bench_linear --toy      # small sizes, also on a CPU

Every variant of a number of rows M runs in this process, interleaved: BF16, each FP8 recipe, with
fast accumulation in all GEMMs, with cached weights, torchao's and Transformer Engine's recipes. A
variant that cannot run here has a row with the reason. Linears:

* each of the seven by itself, eager; ``block``: the sum of their medians;
* ``together``: all seven in one call; q, k, v share one input, and gate, up another;
* ``chain``: these between Hugging Face's RMSNorm, SwiGLU and residual additions, a decoder layer
  without its attention, where producers can write FP8. Eager and compiled, as ``together``.

``median_ms`` is the time on the GPU, which starts when the host has launched everything;
``host_ms`` is the time on the host. ``..._db``: SQNR against float32. ``floor_ms``: lower bound of
GEMMs and casts, from counted bytes and FLOPs (benchmarks/roofline.py) at the card's measured copy
bandwidth and BF16 rate, with twice that rate for FP8; ``fused_floor_ms``: the same if producers and
the optimizer cast.

linear_shapes.csv in the same folder has the times of the recipes per shape, and the fastest.
"""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from benchmarks import peers
from benchmarks.card import free, measured_rates, peak_mib
from benchmarks.measurement import (
    COMPILER,
    GRAPHS,
    NOT_REACHED,
    Budget,
    Table,
    Timing,
    default_device,
    environment,
    graphs_counted,
    interleaved,
    note_of,
    parser,
    print_table,
    read_rows,
    write_rows,
)
from benchmarks.plot import draw
from benchmarks.roofline import TRAFFIC, Rates, Traffic, linears_seconds
from benchmarks.shapes import LLAMA_3_1_8B_BLOCK, TOKENS, TOY_BLOCK, TOY_TOKENS
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.nn.delayed_scaling import renew_scales
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.recipe import GEMMS, RECIPES
from torch_fp8_tools.metrics import sqnr_db

COLUMNS = (
    *("linear", "M", "K", "N", "variant", "mode", "median_ms", "p20_ms", "p80_ms", "host_ms"),
    *("tflops", "floor_ms", "floor_share", "fused_floor_ms", "speedup"),
    *("output_db", "grad_input_db", "grad_weight_db", "peak_mib", *GRAPHS, "note"),
)
SHAPE_COLUMNS = ("M", "K", "N", "fastest", "speedup", "bf16_ms", *(f"{r}_ms" for r in RECIPES))
BF16 = "bf16"
OURS: dict[str, dict[str, Any]] = {
    **{recipe: {"recipe": recipe} for recipe in RECIPES},
    "tensorwise, fast accumulation": {"recipe": "tensorwise", "fast_accum": GEMMS},
    "rowwise, fast accumulation": {"recipe": "rowwise", "fast_accum": GEMMS},
    "tensorwise, weights cached": {"recipe": "tensorwise", "cache_weights": True},
    "blockwise, weights cached": {"recipe": "blockwise", "cache_weights": True},
}
PEERS = (
    *(f"torchao {recipe}" for recipe in peers.TORCHAO_RECIPES),
    *(f"Transformer Engine {recipe}" for recipe in peers.TRANSFORMER_ENGINE_RECIPES),
)
VARIANTS = (BF16, *OURS, *PEERS)
# Each takes half a minute to compile, for each M.
COMPILED = (BF16, "tensorwise", "delayed", "blockwise", "torchao tensorwise", "torchao rowwise")
SAMPLES_MS = 400.0  # per variant; at least 5 repetitions, at most 30
WAIT_MS = {"alone": 3.0, "together": 15.0, "chain": 20.0}  # longer than the host takes to launch
CORNER = 256
"""The rows of the output, the input gradient and the weight gradient whose error is measured."""


class Together(nn.Module):
    """Seven linears that map (M, hidden) and (M, inner) to their outputs."""

    def __init__(self, block: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        for name, (k, n) in block.items():
            setattr(self, name, nn.Linear(k, n, bias=False))

    def forward(self, x: Tensor, attended: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        attention = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(attended)
        return *attention, self.gate_proj(y), self.up_proj(y), self.down_proj(h)


class Chain(nn.Module):
    """A Llama decoder layer without its attention, of Hugging Face's modules."""

    def __init__(self, block: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        hidden, inner = block["gate_proj"]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(*block[name], bias=False))
        self.input_layernorm = LlamaRMSNorm(hidden, eps=1e-5)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=1e-5)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=inner))

    def forward(self, x: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        y = self.input_layernorm(x)
        x = x + self.o_proj(attended)
        out = x + self.mlp(self.post_attention_layernorm(x))
        return self.q_proj(y), self.k_proj(y), self.v_proj(y), out


def main() -> None:
    arguments = parser("linear", __doc__)
    arguments.add_argument("--tokens", nargs="+", type=int, help="rows M")
    arguments.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    arguments.add_argument("--modes", nargs="+", choices=("eager", "compiled"))
    arguments = arguments.parse_args()
    block = TOY_BLOCK if arguments.toy else LLAMA_3_1_8B_BLOCK
    tokens = arguments.tokens or (TOY_TOKENS if arguments.toy else TOKENS)
    modes = arguments.modes or (("eager",) if arguments.toy else ("eager", "compiled"))
    torch._dynamo.config.recompile_limit = 64  # all variants share the code of their forward
    device, budget = default_device(), Budget(arguments.budget)
    table = Table(arguments.csv, COLUMNS, ("M", "mode"), environment(device))
    for mode in modes:  # all sizes eager come before the first that is compiled
        for m in tokens:
            if not budget.fits():
                table.add([{"M": m, "mode": mode, "note": NOT_REACHED}])
                continue
            # Each compiled variant is a piece: all together would exceed the budget.
            with budget.piece() if mode == "eager" else contextlib.nullcontext():
                rates = measured_rates(device, toy=arguments.toy)
                table.add(measure(block, m, arguments.variants, mode, rates, device, budget))
            write_shapes(arguments.csv)
    draw(arguments.csv)
    totals = [row for row in table.rows if row.get("linear") in ("block", "together", "chain")]
    columns = ("linear", "M", "variant", "mode", "median_ms", "host_ms", "floor_share", "speedup")
    print_table((*columns, "note"), totals)


def measure(
    block: dict[str, tuple[int, int]],
    m: int,
    variants: tuple[str, ...],
    mode: str,
    rates: Rates,
    device: torch.device,
    budget: Budget,
) -> list[dict[str, object]]:
    """Return rows of every linear and variant on m rows."""
    rows: list[dict[str, object]] = []
    if mode == "eager":
        shapes = dict.fromkeys(block.values())  # k and v, gate and up are the same GEMMs
        of_shape = {s: alone(*s, m, variants, rates, device, budget) for s in shapes}
        rows += [{"linear": name, **row} for name, s in block.items() for row in of_shape[s]]
        rows += [_total(variant, rows, block, m, rates) for variant in variants]
    elif mode == "compiled":
        variants = tuple(v for v in variants if v in COMPILED)
    for name, module in (("together", Together), ("chain", Chain)):
        rows += whole(name, module(block), block, m, variants, mode, rates, device, budget)
    return [{"M": m, "mode": mode, **row} for row in rows]


def alone(
    k: int,
    n: int,
    m: int,
    variants: tuple[str, ...],
    rates: Rates,
    device: torch.device,
    budget: Budget,
) -> list[dict[str, object]]:
    """Return a row per variant of one linear."""
    torch.manual_seed(0)
    stock = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    grad = torch.randn(m, n, device=device, dtype=torch.bfloat16) * 1e-3
    of = {"": (k, n)}
    rows = _variants(stock, (x,), (grad,), variants, "eager", of, m, rates, device, budget)
    return [{"K": k, "N": n, **row} for row in rows]


def whole(
    name: str,
    module: nn.Module,
    block: dict[str, tuple[int, int]],
    m: int,
    variants: tuple[str, ...],
    mode: str,
    rates: Rates,
    device: torch.device,
    budget: Budget,
) -> list[dict[str, object]]:
    """Return a row per variant of a module that holds all linears of a block."""
    torch.manual_seed(0)
    module = module.to(device, torch.bfloat16)

    def random(linear: str, side: int, size: float = 1.0) -> Tensor:
        shape = (m, block[linear][side])
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * size

    attention = ("q_proj", "k_proj", "v_proj")
    taken, outputs = ("q_proj", "o_proj"), (*attention, "down_proj")
    if name == "together":
        taken, outputs = (*taken, "gate_proj", "down_proj"), tuple(block)
    inputs = [random(linear, 0) for linear in taken]
    tensors = tuple(inputs), tuple(random(linear, 1, 1e-3) for linear in outputs)
    rows = _variants(module, *tensors, variants, mode, block, m, rates, device, budget)
    free(device)
    return [{"linear": name, **row} for row in rows]


def _variants(
    stock: nn.Module,
    inputs: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    variants: tuple[str, ...],
    mode: str,
    linears: dict[str, tuple[int, int]],
    m: int,
    rates: Rates,
    device: torch.device,
    budget: Budget,
) -> list[dict[str, object]]:
    """Build, check and time all variants of a module, interleaved."""
    kind = {"Linear": "alone", "Together": "together", "Chain": "chain"}[type(stock).__name__]
    runs: dict[str, Callable[[], object]] = {}
    notes: dict[str, str] = {}
    figures: dict[str, dict[str, object]] = {variant: {} for variant in variants}
    for variant in variants:
        if mode == "compiled" and not budget.fits():
            notes[variant] = NOT_REACHED
            continue
        with budget.piece() if mode == "compiled" else contextlib.nullcontext():
            try:
                module = build(variant, copy.deepcopy(stock))
                compiled = torch.compile(module, backend=COMPILER) if mode == "compiled" else module
                run = step(compiled, list(module.parameters()), inputs, grads)
                with graphs_counted(figures[variant], mode):
                    run()
                learn_scales(module)
                if kind == "alone":
                    figures[variant] |= errors(stock, inputs[0], grads[0], *run())
                figures[variant]["peak_mib"] = round(peak_mib(run, device), 1)
            except Exception as error:
                notes[variant] = note_of(error)
            else:
                runs[variant] = run
    first = interleaved(runs, device, 1, warmup=1, failures=notes)
    longest = max((timing.median for timing in first.values()), default=1.0)
    many = int(min(max(SAMPLES_MS / longest, 5), 30))
    timings = interleaved(
        {name: runs[name] for name in first},
        device,
        many if device.type == "cuda" else 2,
        wait_ms=WAIT_MS[kind],
        failures=notes,
    )
    torch.compiler.reset()
    free(device)
    rows = []
    for variant in variants:
        row: dict[str, object] = {"variant": variant, "mode": mode, "note": notes.get(variant, "")}
        row |= figures[variant]
        if variant in timings:
            timing = timings[variant]
            row |= timing.columns() | {"host_ms": round(timing.host, 4)}
            row |= speed(timing, timings.get(BF16), variant, linears, m, rates, kind != "alone")
        rows.append(row)
    return rows


def learn_scales(module: nn.Module) -> None:
    """Compute the scales of delayed scaling from the previous pass, as an optimizer step does."""
    renew_scales(layer for layer in module.modules() if isinstance(layer, Float8Layer))


def widen_linears(module: nn.Module) -> None:
    """Make weights float32, so that the optimizer stores them in two halves and keeps payloads."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.float()


def build(variant: str, module: nn.Module) -> nn.Module:
    """Return the module as a variant runs it."""
    if variant == BF16:
        return module
    if variant.startswith("torchao "):
        return peers.torchao(module, variant.removeprefix("torchao "))
    if variant.startswith("Transformer Engine "):
        return peers.TransformerEngine(module, variant.removeprefix("Transformer Engine "))
    config = FP8Config(**OURS[variant])
    if config.cache_weights is True:
        widen_linears(module)
    convert_to_float8(module, config)
    if (
        config.cache_weights is True
    ):  # the optimizer, which steps once per several calls, fills the caches
        optimizer = torch.optim.AdamW(module.parameters())
        convert_optimizer(optimizer, config, model=module)
    return module


def step(
    module: Callable[..., Any],
    parameters: list[nn.Parameter],
    inputs: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Return a function that runs both passes and returns output, first dx and first dw."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def run() -> tuple[Tensor, Tensor, Tensor]:
        for leaf in (*leaves, *parameters):
            leaf.grad = None
        outputs = module(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, grads)
        return outputs[0].detach(), leaves[0].grad, parameters[0].grad

    return run


def errors(
    stock: nn.Module, x: Tensor, grad: Tensor, output: Tensor, dx: Tensor, dw: Tensor
) -> dict[str, object]:
    """Return the SQNR of the three results against float32, on their first rows."""
    weight, some = stock.weight.float(), slice(0, CORNER)
    exact = {
        "output_db": (x[some].float() @ weight.t(), output[some]),
        "grad_input_db": (grad[some].float() @ weight, dx[some]),
        "grad_weight_db": (grad[:, some].float().t() @ x.float(), dw[some]),
    }
    return {name: round(sqnr_db(want, got), 2) for name, (want, got) in exact.items()}


def speed(
    timing: Timing,
    baseline: Timing | None,
    variant: str,
    linears: dict[str, tuple[int, int]],
    m: int,
    rates: Rates,
    share_inputs: bool,
) -> dict[str, object]:
    """Return TFLOP/s of the GEMMs, the floors, and the speed-up over BF16."""
    flops = sum(6 * m * k * n for k, n in linears.values())
    used = traffic(variant)
    floor = linears_seconds(m, linears, rates, used, share_inputs=share_inputs) * 1e3
    fused = None if used is None else TRAFFIC["fused"]
    fused_floor = linears_seconds(m, linears, rates, fused, share_inputs=share_inputs) * 1e3
    return {
        "tflops": round(flops / timing.median / 1e9, 3),
        "floor_ms": round(floor, 4),
        "floor_share": round(floor / timing.median, 3),
        "fused_floor_ms": round(fused_floor, 4),
        "speedup": round(baseline.median / timing.median, 3) if baseline else "",
    }


def traffic(variant: str) -> Traffic | None:
    """Return the traffic of a variant's casts, or None for BF16."""
    if variant == BF16:
        return None
    if variant in TRAFFIC:
        return TRAFFIC[variant]
    return TRAFFIC[variant.partition(", ")[0]]  # accumulation moves nothing


def _total(
    variant: str,
    rows: list[dict[str, object]],
    block: dict[str, tuple[int, int]],
    m: int,
    rates: Rates,
) -> dict[str, object]:
    """Sum the medians over the linears."""

    def medians(name: str) -> list[float]:
        return [row["median_ms"] for row in rows if row["variant"] == name and "median_ms" in row]

    mine, baseline = medians(variant), medians(BF16)
    missing = next((row["note"] for row in rows if row["variant"] == variant and row["note"]), "")
    total: dict[str, object] = {"linear": "block", "variant": variant, "mode": "eager"}
    if len(mine) < len(block):
        return total | {"note": missing}
    total["median_ms"] = round(sum(mine), 4)
    sums = [Timing(sum(ms), 0, 0) if len(ms) == len(block) else None for ms in (mine, baseline)]
    assert sums[0] is not None
    return total | speed(*sums, variant, block, m, rates, share_inputs=False)


def write_shapes(path: Path) -> None:
    """Write the times of the recipes per shape, from single linears' rows, and the fastest."""
    shapes: dict[tuple[int, ...], dict[str, float]] = {}
    for row in read_rows(path):
        if row["K"] and row["median_ms"] and row["variant"] in (BF16, *RECIPES):
            shape = tuple(int(row[column]) for column in ("M", "K", "N"))
            shapes.setdefault(shape, {})[row["variant"]] = float(row["median_ms"])
    rows: list[dict[str, object]] = []
    for shape, times in sorted(shapes.items()):
        fastest = min(times, key=lambda name: times[name])
        row = dict(zip(("M", "K", "N"), shape, strict=True)) | {"fastest": fastest}
        row |= {f"{name}_ms": ms for name, ms in times.items()}
        if BF16 in times:
            row["speedup"] = round(times[BF16] / times[fastest], 3)
        rows.append(row)
    write_rows(path.with_name("linear_shapes.csv"), SHAPE_COLUMNS, rows)


if __name__ == "__main__":
    main()
