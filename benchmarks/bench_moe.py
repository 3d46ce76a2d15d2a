"""Forward and backward of one block of experts of transformers, without its router.

    python -m benchmarks.bench_moe            # on a GPU; runs/benchmarks/moe.csv
    python -m benchmarks.bench_moe --toy      # small sizes, also on a CPU

The baseline is transformers' ``grouped_mm`` on BF16 weights: with float32 weights it would compute
in float32, since autocast does not cover it. Tokens choose experts at random (``random``), or four
fifths of them choose one expert (``skewed``). Variants are interleaved in this process:

* ``fp8``: one function for the block, six FP8 grouped GEMMs;
* ``layer by layer``: a function for each of the two layers, as with adapters;
* ``wgrad in BF16``: the same, four FP8 grouped GEMMs and two of BF16.

* ``median_ms``: time on the GPU, which starts when the host has launched everything; ``host_ms``:
  time on the host.
* ``tflops``: FLOPs of the six products without rows of padding, over ``median_ms``.
* ``saved_bytes_per_token``: distinct storages that autograd saves, parameters apart;
  ``saved_share``: over the baseline's.
* ``output_db``, ``grad_input_db``, ``grad_weight_db``: SQNR against the baseline; the last is the
  worst of all parameters and of the router's scores.
"""

import copy
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.card import free, peak_mib
from benchmarks.measurement import (
    NOT_REACHED,
    Budget,
    Table,
    Timing,
    default_device,
    environment,
    interleaved,
    note_of,
    parser,
    print_table,
)
from benchmarks.shapes import MOE_BLOCKS, MOE_TOKENS, TOY_MOE_BLOCKS, TOY_MOE_TOKENS
from tests.saved_activations import count_saved
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8_tools.metrics import sqnr_db

BF16 = "bf16"
BLOCK, LAYERS, SWITCHED = "fp8", "layer by layer", "wgrad in BF16"
VARIANTS = (BF16, BLOCK, LAYERS, SWITCHED)
ROUTINGS = ("random", "skewed")
COLUMNS = (
    *("model", "tokens", "routing", "rows_per_expert", "variant", "median_ms", "p20_ms", "p80_ms"),
    *("host_ms", "speedup", "tflops", "saved_bytes_per_token", "saved_share", "peak_mib"),
    *("output_db", "grad_input_db", "grad_weight_db", "note"),
)
CLASSES = {
    "qwen3_moe": "Qwen3MoeExperts",
    "gpt_oss": "GptOssExperts",
    "mixtral": "MixtralExperts",
    "deepseek_v3": "DeepseekV3Experts",
}
REPETITIONS, TOY_REPETITIONS = 15, 2
WAIT_MS = 25.0  # longer than the host takes to launch a block
SKEW = 0.8
"""The share of the tokens whose first choice is the same expert."""


class Case(NamedTuple):
    """A block of experts and its inputs, on the device.

    Attributes:
        experts: transformers' module with BF16 weights.
        x, grad: (T, H) BF16, tokens and the gradient of the result.
        scores: (T, k) BF16.
        index: (T, k) int64.
        flops: number of FLOPs of the six products.
    """

    experts: nn.Module
    x: Tensor
    grad: Tensor
    scores: Tensor
    index: Tensor
    flops: float


def main() -> None:
    arguments = parser("moe", __doc__)
    arguments.add_argument("--models", nargs="+", choices=MOE_BLOCKS, default=list(MOE_BLOCKS))
    arguments.add_argument("--tokens", nargs="+", type=int, default=MOE_TOKENS)
    arguments.add_argument("--routings", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    arguments = arguments.parse_args()
    blocks, tokens = MOE_BLOCKS, arguments.tokens
    if arguments.toy:
        blocks, tokens = TOY_MOE_BLOCKS, TOY_MOE_TOKENS
    device, budget = default_device(), Budget(arguments.budget)
    group = ("model", "tokens", "routing")
    table = Table(arguments.csv, COLUMNS, group, environment(device))
    for count in tokens:
        for model in (name for name in arguments.models if name in blocks):
            for routing in arguments.routings:
                where = {"model": model, "tokens": count, "routing": routing}
                if not budget.fits():
                    table.add([where | {"note": NOT_REACHED}])
                    continue
                with budget.piece():
                    table.add([where | row for row in measure(blocks[model], where, device)])
    columns = ("model", "tokens", "routing", "variant", "median_ms", "speedup", "saved_share")
    print_table((*columns, "note"), table.rows)


def measure(
    block: tuple[str, int, int, int, int], where: dict[str, Any], device: torch.device
) -> list[dict[str, object]]:
    """Return a row of each variant.

    Args:
        block: see `MOE_BLOCKS`.
        where: number of tokens, and how they choose experts.
        device: device to run on.
    """
    toy = device.type == "cpu"
    torch.manual_seed(0)
    try:
        case = build(block, where["tokens"], where["routing"], device)
        exact = results(case.experts, case)
    except Exception as error:
        return [{"variant": BF16, "note": note_of(error)}]
    figures: dict[str, dict[str, object]] = {}
    notes: dict[str, str] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name in VARIANTS:
        try:
            experts = variant_of(name, case.experts)
            figures[name] = errors(exact, results(experts, case)) if name != BF16 else {}
            figures[name]["saved_bytes_per_token"] = saved_bytes(experts, case)
            run = step(experts, case)
            figures[name]["peak_mib"] = round(peak_mib(run, device), 1)
        except Exception as error:
            notes[name] = note_of(error)
        else:
            runs[name] = run
    timings = interleaved(
        runs,
        device,
        TOY_REPETITIONS if toy else REPETITIONS,
        wait_ms=0.0 if toy else WAIT_MS,
        failures=notes,
    )
    rows = [row_of(name, case, figures, notes, timings) for name in VARIANTS]
    del case, exact, runs, run
    free(device)
    return rows


def build(
    block: tuple[str, int, int, int, int], tokens: int, routing: str, device: torch.device
) -> Case:
    """Build a block's experts, and tokens that choose among them."""
    kind, hidden, width, num_experts, top_k = block
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    config = SimpleNamespace(
        **dict.fromkeys(names, num_experts),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), width),
        hidden_size=hidden,
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        _experts_implementation="grouped_mm",
    )
    with device:
        experts = getattr(module, CLASSES[kind])(config).to(torch.bfloat16)
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=hidden**-0.5)
        x, grad = (torch.randn(tokens, hidden, dtype=torch.bfloat16) for _ in range(2))
        logits = torch.randn(tokens, num_experts)
        if routing == "skewed":
            logits[: int(SKEW * tokens), 0] += 100
        scores, index = logits.softmax(-1).topk(top_k)
    flops = 6.0 * tokens * top_k * 3 * width * hidden
    return Case(experts, x, grad * 1e-3, scores.to(torch.bfloat16), index, flops)


def variant_of(name: str, stock: nn.Module) -> nn.Module:
    """Return the experts as a variant runs them; the baseline runs the module itself."""
    if name == BF16:
        return stock
    experts: Any = copy.deepcopy(stock)
    convert_to_float8(experts, FP8Config(wgrad="bf16" if name == SWITCHED else "fp8"))
    if name == LAYERS:
        experts.fp8_gate = None
    return experts


def step(experts: nn.Module, case: Case) -> Callable[[], None]:
    """Return a function that runs one forward and backward."""
    leaves = [t.detach().requires_grad_() for t in (case.x, case.scores)]

    def run() -> None:
        for tensor in (*leaves, *experts.parameters()):
            tensor.grad = None
        experts(leaves[0], case.index, leaves[1]).backward(case.grad)

    return run


def results(experts: nn.Module, case: Case) -> dict[str, Tensor]:
    """Return the output and the gradients of tokens, scores and parameters."""
    experts.zero_grad()
    leaves = [t.detach().requires_grad_() for t in (case.x, case.scores)]
    output = experts(leaves[0], case.index, leaves[1])
    output.backward(case.grad)
    grads = {f"grad_weight {name}": p.grad for name, p in experts.named_parameters()}
    experts.zero_grad()
    named = {"output": output.detach(), "grad_input": leaves[0].grad}
    return named | {"grad_weight scores": leaves[1].grad} | grads


def errors(exact: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, object]:
    """Return the SQNR of each result in dB, and the worst of the weights'."""
    db = {name: sqnr_db(exact[name].float(), got[name].float()) for name in exact}
    weights = min(value for name, value in db.items() if name.startswith("grad_weight"))
    worst = {"output": db["output"], "grad_input": db["grad_input"], "grad_weight": weights}
    return {f"{name}_db": round(value, 2) for name, value in worst.items()}


def saved_bytes(experts: nn.Module, case: Case) -> float:
    """Return the bytes of a token that autograd saves, parameters apart."""
    leaves = [t.detach().requires_grad_() for t in (case.x, case.scores)]
    with count_saved((*experts.parameters(), *leaves, case.index)) as saved:
        experts(leaves[0], case.index, leaves[1])
    return round(saved.total / len(case.x), 1)


def row_of(
    name: str,
    case: Case,
    figures: dict[str, dict[str, object]],
    notes: dict[str, str],
    timings: dict[str, Timing],
) -> dict[str, object]:
    """Return the row of a variant."""
    rows = case.index.numel() / int(case.experts.num_experts)
    row: dict[str, object] = {"rows_per_expert": round(rows, 1), "variant": name}
    row |= {"note": notes.get(name, ""), **figures.get(name, {})}
    baseline = figures.get(BF16, {}).get("saved_bytes_per_token")
    if baseline and "saved_bytes_per_token" in row:
        row["saved_share"] = round(row["saved_bytes_per_token"] / baseline, 3)
    if name in timings:
        median = timings[name].median
        row |= timings[name].columns() | {"host_ms": round(timings[name].host, 4)}
        row["tflops"] = round(case.flops / median / 1e9, 3)
        if BF16 in timings:
            row["speedup"] = round(timings[BF16].median / median, 3)
    return row


if __name__ == "__main__":
    main()
