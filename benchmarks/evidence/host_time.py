"""Host time to launch a Llama block and an optimizer step, measured without a card.

    python -m benchmarks.evidence.host_time    # runs/benchmarks/host_time.csv

A Hugging Face LlamaDecoderLayer runs forward and backward in eager mode on a few tokens and
features, so that arithmetic takes almost no time. Our implementations for CUDA run on CPU
tensors, and their launches go through Triton to a driver that does nothing
(`evidence.stub_driver`). A real driver needs 2 to 3 us more per launch, in BF16
as in FP8. Variants are interleaved in this process. Each runs once more before it is timed, because
a block of a model follows another one.

One case measures compiled blocks and eager ones. Compiled blocks run the code that Inductor
generates for an H200, for the sizes of Llama-3.1-8B at 8,192 tokens, with torch.compile's own
guards and wrappers (`evidence.generated_call`).

* ``mode``: eager, or compiled;
* ``host_us``: CPU time of the thread, the 10th percentile of all repetitions. Other work on the
  machine slows some of them; the minimum would be one with an unusually fast clock.
  ``median_us``: the median. From BF16's times ``gemm_us`` is subtracted, the time in which GEMMs
  compute: their time beyond that of as many GEMMs of single elements;
* ``ratio``: ``host_us`` over BF16's in the same case; ``ratio_with_gemms``: over BF16's without
  subtracting ``gemm_us``;
* ``kernels``, ``gemms``: our and Inductor's launches, and FP8 GEMMs of eager blocks;
* ``calls``: calls of Python and C functions from Python, the same in every run.
"""

import argparse
import contextlib
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

from benchmarks.evidence.stub_driver import Counts, stub_driver  # before torch_fp8

# isort: split
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks.evidence.compiled_block import BLOCKS, Block
from benchmarks.evidence.generated_call import compiled, generated_calls, reuse_memory
from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from benchmarks.shapes import LLAMA_3_2_3B, parameter_shapes
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.kernels import quantize, rms_norm, swiglu
from torch_fp8.kernels.launch_tape import forget_recordings
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.rollout import rollout
from torch_fp8.optim.state import is_large
from torch_fp8.tensor.split_weight import split_parameter, stored

TOKENS, HIDDEN, INNER, HEADS, GROUPS = 16, 128, 256, 2, 1
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
BF16 = "BF16"
COLUMNS = (
    *("what", "mode", "recipe", "host_us", "ratio", "ratio_with_gemms", "median_us", "gemm_us"),
    *("kernels", "gemms", "calls"),
    *("torch", "triton", "commit", "date", "command"),
)
MANY = "inference, many tokens"
"""The case in which no tile holds all tokens: a tensorwise amax then takes its own launch."""
WIDE = "training, float32 weights"
"""A case of weights that the optimizer splits, under autocast; `CACHED` is another."""
CACHED = "training, cache_weights"
autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
CASES: dict[str, dict[str, object]] = {
    "training": {},
    WIDE: {},
    "training, checkpointed": {},
    CACHED: {"cache_weights": True},
    "training, O3": {"opt_level": "O3"},
    "inference": {},
    MANY: {},
}
COMPILED = "training, compiled"
"""Compiled blocks, measured together with the eager ones of the case ``training``."""
COMPILED_VARIANTS = (
    *(BF16, "tensorwise", "tensorwise last_step O2 with payloads"),
    *("delayed", "blockwise", "torchao tensorwise"),
)
AS_COMPILED = ", compiled"
"""The suffix of a variant's name."""
STEP = "optimizer step"
TENSORS = 4096
"""Elements of a weight in the optimizer's step: the least that has 8-bit states."""

Run = Callable[[], None]


def block(case: str, recipe: str) -> Run:
    """Return one forward and backward of a block in a case."""
    torch.manual_seed(0)
    of_model = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_hidden_layers=1,
    )
    of_model._attn_implementation = "sdpa"
    layer, rotary = LlamaDecoderLayer(of_model, 0), LlamaRotaryEmbedding(of_model)
    layer.to(torch.float32 if case in (WIDE, CACHED) else torch.bfloat16)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16)
    angles = rotary(x, torch.arange(TOKENS)[None])
    tensors = [x, *layer.parameters()]
    if recipe != BF16:
        config = FP8Config(recipe=recipe, **CASES[case])
        convert_to_float8(layer, config)
        optimizer = torch.optim.AdamW(layer.parameters())
        convert_optimizer(optimizer, config, model=layer)
        layer._optimizer = optimizer  # whose hooks at O3 live as long as it
        for module in layer.modules():  # as after an optimizer's step
            if isinstance(module, Float8Layer) and module.fp8.recipe.delayed:
                history, scales = module.scaling_state
                module.load_scaling_state(history.fill_(1), scales)

    generates = case in ("inference", MANY)
    if generates:
        layer.eval()
        scope = rollout(layer)  # which ends with the block
        scope.__enter__()
        layer._scope = scope

    def inference() -> None:
        with torch.no_grad():
            layer(x, position_embeddings=angles)

    def training() -> None:
        if case == "training, checkpointed":
            y = checkpoint(layer, x, position_embeddings=angles, use_reentrant=False)
        else:
            with autocast() if case in (WIDE, CACHED) else contextlib.nullcontext():
                y = layer(x, position_embeddings=angles)
        y.backward(grad.to(y.dtype))
        for tensor in tensors:
            tensor.grad = None

    if not generates:
        return training
    return inference


def compiled_block(size: str, variant: str) -> Run:
    """One forward and backward of a compiled block; within `generated_calls`.

    Args:
        size: a key of `evidence.compiled_block.BLOCKS`.
        variant: one of `evidence.compiled_block.VARIANTS`.
    """
    layout, tokens = BLOCKS[size]
    layer = Block(layout, variant)
    new = functools.partial(torch.empty, dtype=torch.bfloat16)
    x = new(1, tokens, layout["hidden_size"], requires_grad=True)
    grad = new(1, tokens, layout["hidden_size"])
    angles = [new(1, tokens, layout["head_dim"]) for _ in range(2)]
    tensors, call = [x, *layer.parameters()], compiled(layer)

    def training() -> None:
        call(x, *angles).backward(grad)
        for tensor in tensors:
            tensor.grad = None

    return training


def compiled_and_eager(size: str, variants: tuple[str, ...] = COMPILED_VARIANTS) -> dict[str, Run]:
    """BF16 and tensorwise, eager, and `variants`, compiled."""
    eager = {name: block("training", name) for name in (BF16, "tensorwise")}
    return eager | {f"{name}{AS_COMPILED}": compiled_block(size, name) for name in variants}


def products_of(case: str) -> tuple[Run, Run]:
    """Return two runs of a block's GEMMs in BF16: of full size, and of single elements."""
    kv = HIDDEN * GROUPS // HEADS
    layers = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, kv)] * 2 + [(HIDDEN, INNER)] * 2 + [(INNER, HIDDEN)]
    sizes = []
    for k, n in layers:
        sizes += [(TOKENS, k, n)] * (2 if "checkpointed" in case else 1)
        if "training" in case:
            sizes += [(TOKENS, n, k), (n, TOKENS, k)]
    new = functools.partial(torch.ones, dtype=torch.bfloat16)
    factors = [(new(m, k), new(n, k).t()) for m, k, n in sizes]
    single = new(1, 1)

    def computing() -> None:
        for a, b in factors:
            torch.mm(a, b)

    def empty() -> None:
        for _ in factors:
            torch.mm(single, single)

    return computing, empty


def optimizer_step(level: str) -> Run:
    """A step on as many tensors as Llama-3.2-3B has; `level` of ours, or torch's fused AdamW."""
    parameters = []
    for shape in parameter_shapes(**LLAMA_3_2_3B):
        size = (1,) if level == BF16 else (64, TENSORS // 64) if len(shape) == 2 else (64,)
        parameters.append(nn.Parameter(torch.zeros(size)))
    optimizer = torch.optim.AdamW(parameters, fused=level == BF16)
    if level != BF16:
        convert_optimizer(optimizer, FP8Config(opt_level=level))
        for parameter in parameters:  # no model is there to show that they may be split
            if is_large(parameter):
                split_parameter(parameter)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(stored(parameter))
    return optimizer.step


def measure(runs: dict[str, Run], repetitions: int) -> dict[str, list[float]]:
    """CPU time of each in microseconds, in turn."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    for _ in range(repetitions):
        for name, run in runs.items():
            run()
            began = time.thread_time_ns()
            run()
            samples[name].append((time.thread_time_ns() - began) / 1e3)
    return samples


@contextlib.contextmanager
def no_whole_tiles() -> Iterator[None]:
    """Let no tile of a cast hold all tokens."""
    with contextlib.ExitStack() as stack:
        for module in (quantize, rms_norm, swiglu):
            stack.enter_context(mock.patch.object(module, "whole_tile", _no_tile))
        forget_recordings()
        yield
    forget_recordings()


def _no_tile(x: torch.Tensor, columnwise: bool) -> None:
    return None


def count_calls(run: Run) -> int:
    """Calls of functions from Python."""
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def rows(what: str, runs: dict[str, Run], counts: Counts, repetitions: int) -> list[dict]:
    """Return a row for each run; the first run is the baseline."""
    products: dict[str, Run] = {}
    if what in (*CASES, COMPILED):
        products = dict(zip(("computing", "empty"), products_of(what), strict=True))
    for run in runs.values():
        for _ in range(10):  # launchers are built, states are there, first steps were looked at
            run()
    made = []
    for name, run in runs.items():
        kernels, gemms = counts.kernels, counts.gemms
        run()
        launched = counts.kernels - kernels, counts.gemms - gemms
        recipe = name.removesuffix(AS_COMPILED)
        mode = "eager" if recipe == name else "compiled"
        row = {"what": what, "mode": mode, "recipe": recipe, "calls": count_calls(run)}
        made.append(row)
        made[-1] |= dict(zip(("kernels", "gemms"), launched, strict=True))
    times = measure(runs | products, repetitions)
    tenth = {name: sorted(samples)[len(samples) // 10] for name, samples in times.items()}
    computed = tenth["computing"] - tenth["empty"] if products else 0.0
    whole = next(iter(tenth.values()))
    for name, row in zip(runs, made, strict=True):
        of_gemms = computed if name == BF16 else 0.0
        host, median = tenth[name] - of_gemms, statistics.median(times[name]) - of_gemms
        row |= {"host_us": round(host), "median_us": round(median), "gemm_us": round(of_gemms)}
        row["ratio"] = f"{host / (whole - computed):.2f}"
        row["ratio_with_gemms"] = f"{tenth[name] / whole:.2f}"
    return made


def runs_of(case: str, recipes: tuple[str, ...] = RECIPES) -> dict[str, Run]:
    """Return BF16 and all recipes that the case supports."""
    names = [r for r in recipes if not (r == "delayed" and "cache_weights" in case)]
    return {name: block(case, name) for name in (BF16, *names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=300)
    cases = (*CASES, STEP, COMPILED)
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, metavar="CASE")
    add_csv(parser, "host_time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = environment(torch.device("cpu"))
    made: list[dict] = []
    with stub_driver() as counts:
        for case in (case for case in options.cases if case in CASES):
            with no_whole_tiles() if case == MANY else contextlib.nullcontext():
                made += rows(case, runs_of(case), counts, options.repetitions)
        if STEP in options.cases:
            runs = {level: optimizer_step(level) for level in (BF16, "O2")}
            made += rows(f"{STEP}, 254 tensors", runs, counts, max(options.repetitions // 10, 1))
        if COMPILED in options.cases:
            reuse_memory()
            with generated_calls():
                made += rows(COMPILED, compiled_and_eager("8B"), counts, options.repetitions)
    made = [{column: (row | about).get(column, "") for column in COLUMNS} for row in made]
    write_rows(options.csv, COLUMNS, made)
    print_table(COLUMNS[:11], made)


if __name__ == "__main__":
    main()
