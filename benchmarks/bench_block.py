"""Forward and backward of one Hugging Face decoder layer of the Llama-3.1-8B layout.

    python -m benchmarks.bench_block            # on a GPU; runs/benchmarks/block.csv
    python -m benchmarks.bench_block --toy      # small sizes, also on a CPU

The real LlamaDecoderLayer with SDPA and BF16 weights, sequences of 4096; BF16, our recipes,
torchao's and Transformer Engine's, eager and compiled, interleaved in this process.

* ``median_ms``: time on the GPU, which starts when the host has launched everything; ``host_ms``:
  time on the host.
* ``saved_bytes_per_token``: distinct storages that autograd saves, parameters apart, by
  saved-tensor hooks; ``held_bytes_per_token``: by how much allocated memory grows in forward.
* ``output_db``, ``grad_input_db``, ``grad_weight_db``: SQNR, compared with the layer in float32, of
  the layer's contribution to the residual stream, of that to its gradient, and of the worst weight.
* ``recipe``: recipe of our linears; ``auto`` chooses it if the variant has none.
* ``floor_ms``: lower bound for that recipe, from counted bytes and FLOPs at the card's measured
  rates (benchmarks/roofline.py).

block_kernels.csv in the same folder has the slowest kernels.
"""

import argparse
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks import kernels, peers
from benchmarks.bench_linear import BF16, PEERS, learn_scales, traffic, widen_linears
from benchmarks.bench_linear import OURS as OF_LINEARS
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
    layers_apart,
    note_of,
    parser,
    print_table,
)
from benchmarks.plot import draw
from benchmarks.roofline import TRAFFIC, Traffic, block_seconds
from benchmarks.shapes import LLAMA_3_1_8B, SEQUENCE, TOY_LLAMA, TOY_SEQUENCE
from tests.saved_activations import count_saved
from torch_fp8 import Float8Linear, FP8Config, convert_optimizer, convert_to_float8
from torch_fp8_tools.metrics import sqnr_db

COLUMNS = (
    *("batch", "sequence", "variant", "mode", "median_ms", "p20_ms", "p80_ms", "host_ms"),
    *("floor_ms", "floor_share", "fused_floor_ms", "speedup", "speedup_over_compiled"),
    *("saved_bytes_per_token", "held_bytes_per_token", "saved_share", "peak_mib", "recipe"),
    *("output_db", "grad_input_db", "grad_weight_db", *GRAPHS, "note"),
)
DEFAULT, APART = "default", "layers apart"
OURS: dict[str, dict[str, object]] = {
    DEFAULT: {},
    **{name: dict(options) for name, options in OF_LINEARS.items() if name != "tensorwise"},
    "last step's scales": {"graph_scales": "last_step"},
    APART: {"recipe": "tensorwise"},
    "wgrad in BF16": {"wgrad": "bf16"},
    "Transformer Engine as our backend": {"backend": "transformer-engine"},
}
VARIANTS = (BF16, *OURS, *PEERS)
COMPILED = (
    *(BF16, DEFAULT, "torchao tensorwise", APART, "last step's scales"),
    *("tensorwise, weights cached", "tensorwise, fast accumulation"),
    *("torchao rowwise", "delayed", "blockwise"),
)
PROFILED = tuple(
    f"{variant}/{mode}" for variant in (BF16, DEFAULT, "delayed") for mode in ("eager", "compiled")
)
REPETITIONS, TOY_REPETITIONS = 15, 2
WAIT_MS = 25.0  # longer than the host takes to launch a layer


def main() -> None:
    arguments = parser("block", __doc__)
    arguments.add_argument("--batches", nargs="+", type=int, default=(2, 4, 1), help="sequences")
    arguments.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    arguments.add_argument("--modes", nargs="+", choices=("eager", "compiled"))
    arguments = arguments.parse_args()
    if arguments.toy:
        arguments.batches = (2,)
    arguments.modes = arguments.modes or (("eager",) if arguments.toy else ("eager", "compiled"))
    torch._dynamo.config.recompile_limit = 64  # all variants share the code of their forward
    device, budget = default_device(), Budget(arguments.budget)
    about = environment(device)
    table = Table(arguments.csv, COLUMNS, ("batch", "sequence", "mode"), about)
    where = arguments.csv.with_name("block_kernels.csv")
    profiles = Table(
        where, ("batch", "variant", "mode", *kernels.COLUMNS), ("batch", "sequence"), about
    )
    for batch in arguments.batches:
        if not budget.fits():
            sequence = TOY_SEQUENCE if arguments.toy else SEQUENCE
            row = {"batch": batch, "sequence": sequence, "note": NOT_REACHED}
            table.add([row | {"mode": mode} for mode in arguments.modes])
            continue
        for rows, profiled in measure(batch, arguments, device, budget):
            table.add(rows)
            profiles.add(profiled)
    draw(arguments.csv)
    columns = ("batch", "variant", "mode", "median_ms", "host_ms", "speedup_over_compiled")
    print_table((*columns, "saved_share", "peak_mib", "note"), table.rows)


def measure(
    batch: int, arguments: argparse.Namespace, device: torch.device, budget: Budget
) -> Iterator[tuple[list[dict[str, object]], list[dict[str, object]]]]:
    """Yield rows of all variants at a batch size, and the kernels of some of them.

    The first rows are those of eager variants, because compiling takes longer than timing all of
    them. The next rows time all variants together, with as many compiled ones as the budget allows.
    """
    layout = TOY_LLAMA if arguments.toy else LLAMA_3_1_8B
    sequence = TOY_SEQUENCE if arguments.toy else SEQUENCE
    tokens = batch * sequence
    rates = measured_rates(device, toy=arguments.toy)
    stock, inputs = layer_and_inputs(layout, batch, sequence, device)
    exact = results(copy.deepcopy(stock).float(), stock, *(x.float() for x in inputs))
    runs: dict[str, Callable[[], None]] = {}
    notes: dict[str, str] = {}
    figures: dict[str, dict[str, object]] = {}

    def make(name: str) -> None:
        variant, mode = name.split("/")
        try:
            layer = build(variant, copy.deepcopy(stock))
            # The optimizer's copies of weights, our own autograd functions: all is in `layer`.
            called = torch.compile(layer, backend=COMPILER) if mode == "compiled" else layer
            figures[name] = {"recipe": recipe_of(layer)}
            with graphs_counted(figures[name], mode):
                results(called, layer, *inputs)
            learn_scales(layer)
            found = results(called, layer, *inputs)
            figures[name] |= errors(exact, found)
            figures[name] |= kept(called, layer, inputs, tokens, device)
            run = step(called, layer, inputs)
            figures[name]["peak_mib"] = round(peak_mib(run, device), 1)
        except Exception as error:
            notes[name] = note_of(error)
        else:
            runs[name] = run

    names: list[str] = []
    for mode in arguments.modes:
        of_mode = [f"{v}/{mode}" for v in arguments.variants if mode == "eager" or v in COMPILED]
        names += of_mode
        with budget.piece() if mode == "eager" else contextlib.nullcontext():
            for name in of_mode:
                if mode == "eager":
                    make(name)
                elif budget.fits():
                    with budget.piece():
                        make(name)
                else:
                    notes[name] = NOT_REACHED
            timings = interleaved(
                runs,
                device,
                TOY_REPETITIONS if arguments.toy else REPETITIONS,
                wait_ms=0.0 if arguments.toy else WAIT_MS,
                failures=notes,
            )
        profiled: list[dict[str, object]] = []
        for name in timings:
            if name in PROFILED:
                about = dict(zip(("variant", "mode"), name.split("/"), strict=True))
                found = kernels.kernel_rows(runs[name], device)
                profiled += [{"batch": batch, **about, **row} for row in found]
        where = {"batch": batch, "sequence": sequence}
        floors = functools.partial(block_seconds, tokens, sequence, layout, rates)
        yield [where | row_of(name, figures, notes, timings, floors) for name in names], profiled
    torch.compiler.reset()
    free(device)


def row_of(
    name: str,
    figures: dict[str, dict[str, object]],
    notes: dict[str, str],
    timings: dict[str, Timing],
    floors: Callable[[Traffic | None], float],
) -> dict[str, object]:
    """Return the row of ``variant/mode``.

    Args:
        floors: function from the casts' traffic to a lower bound of a block's seconds.
    """
    variant, mode = name.split("/")
    row: dict[str, object] = {"variant": variant, "mode": mode, "note": notes.get(name, "")}
    row |= figures.get(name, {})
    baseline = figures.get(f"{BF16}/eager", {}).get("saved_bytes_per_token")
    if baseline and "saved_bytes_per_token" in row:
        row["saved_share"] = round(row["saved_bytes_per_token"] / baseline, 3)
    if name not in timings:
        return row
    median, used = timings[name].median, traffic_of(variant, figures[name]["recipe"])
    floor = floors(used) * 1e3
    row |= timings[name].columns() | {
        "host_ms": round(timings[name].host, 4),
        "floor_ms": round(floor, 4),
        "floor_share": round(floor / median, 3),
        "fused_floor_ms": round(floors(None if used is None else TRAFFIC["fused"]) * 1e3, 4),
    }
    for column, of in (("speedup", mode), ("speedup_over_compiled", "compiled")):
        if f"{BF16}/{of}" in timings:
            row[column] = round(timings[f"{BF16}/{of}"].median / median, 3)
    return row


def layer_and_inputs(
    layout: dict[str, object], batch: int, sequence: int, device: torch.device
) -> tuple[LlamaDecoderLayer, tuple[Tensor, ...]]:
    """Return the BF16 layer, hidden states, the gradient of the output, cosines and sines."""
    torch.manual_seed(0)
    config = LlamaConfig(**layout, attn_implementation="sdpa")
    with device:
        layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
        rotary = LlamaRotaryEmbedding(config)
        shape = (batch, sequence, config.hidden_size)
        hidden = torch.randn(shape, dtype=torch.bfloat16)
        grad = torch.randn(shape, dtype=torch.bfloat16) * 1e-3
        cos, sin = rotary(hidden, torch.arange(sequence)[None])
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return layer.train(), (hidden, grad, cos, sin)


def build(variant: str, layer: nn.Module) -> nn.Module:
    """Return the layer as a variant runs it."""
    if variant == BF16:
        return layer
    if variant.startswith("torchao "):
        return peers.torchao(layer, variant.removeprefix("torchao "))
    if variant.startswith("Transformer Engine "):
        return peers.TransformerEngine(layer, variant.removeprefix("Transformer Engine "))
    config = FP8Config(**OURS[variant])
    if config.cache_weights is True:
        widen_linears(layer)
    with layers_apart() if variant == APART else contextlib.nullcontext():
        convert_to_float8(layer, config)
    if config.cache_weights is True:
        convert_optimizer(torch.optim.AdamW(layer.parameters()), config, model=layer)
    return layer


def recipe_of(layer: nn.Module) -> str:
    """Return the recipe of our linears, or an empty string without any."""
    linears = [module for module in layer.modules() if isinstance(module, Float8Linear)]
    return linears[0].fp8.recipe.name if linears else ""


def traffic_of(variant: str, recipe: str):
    """Return the traffic of a variant's casts if its linears run `recipe`, or None for BF16."""
    if variant in OURS and variant not in OF_LINEARS:
        return traffic(recipe or BF16)  # auto may find no linear faster in FP8
    return traffic(variant)


def step(called: Callable, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a function that runs one forward and backward."""
    hidden, grad, cos, sin = inputs
    leaf = hidden.detach().requires_grad_()
    parameters = list(layer.parameters())

    def run() -> None:
        for tensor in (leaf, *parameters):
            tensor.grad = None
        called(leaf, position_embeddings=(cos, sin)).backward(grad)

    return run


def results(
    called: Callable, layer: nn.Module, hidden: Tensor, grad: Tensor, cos: Tensor, sin: Tensor
) -> dict[str, Tensor]:
    """Return what the layer adds to the input and to its gradient, and gradients of the linears'
    weights.
    """
    layer.zero_grad()
    leaf = hidden.detach().requires_grad_()
    owner = called if isinstance(called, nn.Module) else layer
    out = called(leaf, position_embeddings=(cos, sin))
    out.backward(grad)
    weights = [p.grad for p in owner.parameters() if p.ndim == 2 and p.grad is not None]
    found = {"output": out.detach() - hidden, "grad_input": leaf.grad - grad}
    found |= {f"grad_weight {i}": weight for i, weight in enumerate(weights)}
    return found


def errors(exact: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, object]:
    """Return the SQNR of each result in dB, and the worst of the weights'."""
    db = {name: sqnr_db(exact[name], got[name].float()) for name in exact}
    weights = min(value for name, value in db.items() if name.startswith("grad_weight"))
    kept = {"output": db["output"], "grad_input": db["grad_input"], "grad_weight": weights}
    return {f"{name}_db": round(value, 2) for name, value in kept.items()}


def kept(
    called: Callable,
    layer: nn.Module,
    inputs: tuple[Tensor, ...],
    tokens: int,
    device: torch.device,
) -> dict[str, object]:
    """Return bytes per token that live between forward and backward, counted and measured."""
    hidden, grad, cos, sin = inputs
    leaf = hidden.detach().requires_grad_()
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    out = called(leaf, position_embeddings=(cos, sin))
    held = torch.cuda.memory_allocated(device) - before - out.nbytes if on_gpu else 0
    out.backward(grad)
    del out
    with count_saved((*layer.parameters(), cos, sin)) as saved:
        called(leaf, position_embeddings=(cos, sin))
    counted = {"saved_bytes_per_token": round(saved.total / tokens, 1)}
    return counted | ({"held_bytes_per_token": round(held / tokens, 1)} if on_gpu else {})


if __name__ == "__main__":
    main()
