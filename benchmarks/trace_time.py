"""What torch.compile takes to trace a Llama block, before any kernel is generated.

    python -m benchmarks.trace_time    # runs/benchmarks/trace_time.csv

Dynamo traces a Hugging Face LlamaDecoderLayer to one graph (backend ``eager``), and AOTAutograd
traces that to a graph of forward and one of backward (backend ``aot_eager``). Each repetition is
cold: ``torch._dynamo.reset()`` comes first. Recipes and BF16 take turns in this process.

* ``host_ms``: CPU time of the thread in a first call, less that in a second one, which only runs
  the graph: the least of all repetitions; ``median_ms``: the median;
* ``ratio``: of ``host_ms`` to BF16's with the same backend;
* ``graphs``: what Dynamo has handed to the backend, more than one where it breaks a graph;
* ``functions``: of Python that Dynamo has traced through: the same in every run.
"""

import argparse
import gc
import statistics
import time
from typing import Any
from unittest import mock

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.backends.registry import lookup_backend
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from torch_fp8 import FP8Config, convert_to_float8

RECIPES = ("BF16", "tensorwise", "delayed", "rowwise", "blockwise")
BACKENDS = ("eager", "aot_eager")
TOKENS, HIDDEN, INNER, HEADS, GROUPS = 16, 128, 256, 2, 1
COLUMNS = (
    *("backend", "recipe", "host_ms", "ratio", "median_ms", "graphs", "functions"),
    *("torch", "commit", "date", "command"),
)


class Traced:
    """A block of a recipe, and what tracing it takes."""

    def __init__(self, recipe: str) -> None:
        torch.manual_seed(0)
        sizes = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            num_hidden_layers=1,
        )
        sizes._attn_implementation = "sdpa"
        self.layer = LlamaDecoderLayer(sizes, 0).bfloat16()
        self.x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        self.angles = LlamaRotaryEmbedding(sizes)(self.x, torch.arange(TOKENS)[None])
        if recipe != "BF16":
            convert_to_float8(self.layer, FP8Config(recipe=recipe))

    def trace(self, backend: str) -> tuple[float, int]:
        """Milliseconds until a first call runs its graph, and the graphs that the backend got."""
        torch._dynamo.reset()
        gc.collect()
        graphs = 0
        compiler = lookup_backend(backend)

        def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            nonlocal graphs
            graphs += 1
            return compiler(graph, inputs)

        compiled = torch.compile(self.layer, backend=counting, dynamic=False)
        times = [time.thread_time_ns()]
        for _ in range(2):
            compiled(self.x, position_embeddings=self.angles)
            times.append(time.thread_time_ns())
        began, traced, ended = times
        return (2 * traced - began - ended) / 1e6, graphs

    def functions(self) -> int:
        """How many functions Dynamo traces through."""
        inlined = 0
        tracer = symbolic_convert.InliningInstructionTranslator
        original = tracer.inline_call

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal inlined
            inlined += 1
            return original(*args, **options)

        with mock.patch.object(tracer, "inline_call", counted):
            self.trace("eager")
        return inlined


def rows(backend: str, recipes: tuple[str, ...], repetitions: int) -> list[dict[str, Any]]:
    """A row for each recipe; the first is what the others are compared to."""
    blocks = {recipe: Traced(recipe) for recipe in recipes}
    times: dict[str, list[float]] = {recipe: [] for recipe in recipes}
    made = []
    for recipe, block in blocks.items():
        _, graphs = block.trace(backend)
        made.append({"backend": backend, "recipe": recipe, "graphs": graphs})
        made[-1]["functions"] = block.functions()
    for _ in range(repetitions):
        for recipe, block in blocks.items():
            times[recipe].append(block.trace(backend)[0])
    baseline = min(times[recipes[0]])
    for row in made:
        found = times[str(row["recipe"])]
        row |= {"host_ms": round(min(found)), "median_ms": round(statistics.median(found))}
        row["ratio"] = f"{min(found) / baseline:.2f}"
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=8)
    add_csv(parser, "trace_time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = environment(torch.device("cpu"))
    made = [row for b in BACKENDS for row in rows(b, RECIPES, options.repetitions)]
    made = [{column: (row | about).get(column, "") for column in COLUMNS} for row in made]
    write_rows(options.csv, COLUMNS, made)
    print_table(COLUMNS[:7], made)


if __name__ == "__main__":
    main()
