"""Selective checkpoints of ours and of torch, of one Llama block: GEMMs again, bytes, host time.

    python -m benchmarks.checkpoint_policies    # benchmarks/results/checkpoint_policies.csv

Hugging Face's decoder layer of Llama-3.1-8B's proportions at a quarter of its width, on 256 tokens:

* ``whole``: ``torch.utils.checkpoint`` as it is;
* ``torch_fp8``: with `torch_fp8.selective_checkpoint_contexts`;
* ``torch``: with ``create_selective_checkpoint_contexts`` and a policy that saves what the FP8
  casts of activations and attention return, and recomputes the rest;
* ``torch, products``: the same, and the results of the GEMMs saved, too.

``gemms_again`` are the forward's GEMMs that backward runs again; `share` is of the bytes that eager
BF16 keeps. In a compiled graph, which torch's own mechanism partitions for all of them, they are
counted in the graphs of forward and backward. ``host_us`` is the CPU time of a thread for forward
and backward of a tiny block whose kernels a driver that does nothing takes
(`benchmarks.stub_driver`), without a checkpoint in the row ``none``. A refusal stands in `error`.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.activation_bytes import LAYOUTS, TOKENS, Gemms, forward_of, kept
from benchmarks.measurement import RESULTS, environment, print_table, write_rows
from benchmarks.saved_activations import count_saved
from torch_fp8 import FP8Config, selective_checkpoint_contexts
from torch_fp8.autograd.recompute_trace import ATTENTION, CASTS, argument_of, operator_name

RECIPES = ("tensorwise", "delayed", "blockwise")
SIZES = {name: size // 4 for name, size in LAYOUTS["Llama-3.1-8B"].items()}
COLUMNS = (
    *("checkpoint", "recipe", "mode", "gemms_again", "bytes_per_token", "share", "host_us"),
    *("error", "torch", "commit", "command"),
)


def policy(products: bool, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Torch's policy that names our operators; see the module."""
    saved = operator_name(func) in (*CASTS, *ATTENTION)
    if argument_of(func, "columnwise", args, kwargs) is False:  # a weight's
        saved = False
    if products and operator_name(func) == "scaled_mm":
        saved = True
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def torch_contexts(products: bool) -> Any:
    """Contexts of torch's selective checkpoint."""
    return create_selective_checkpoint_contexts(functools.partial(policy, products))


CONTEXTS: dict[str, Callable[[], Any] | None] = {
    "whole": None,
    "torch_fp8": selective_checkpoint_contexts,
    "torch": functools.partial(torch_contexts, False),
    "torch, products": functools.partial(torch_contexts, True),
}


def options_of(kind: str, made: list[Any]) -> dict[str, Any]:
    """Options of ``checkpoint``; `made` gets the contexts."""
    contexts = CONTEXTS[kind]
    if contexts is None:
        return {}

    def keeping() -> Any:
        made.extend(contexts())
        return made[0], made[1]

    return {"context_fn": keeping}


def eager(kind: str, config: FP8Config) -> tuple[int, float]:
    """GEMMs again, and bytes per token."""
    if kind == "none":
        return 0, kept(SIZES, config)
    _, there, run, x = forward_of(SIZES, config)
    run(x).sum().backward()
    with Gemms() as plain:
        run(x).sum().backward()
    made: list[Any] = []
    with Gemms() as gemms:
        with count_saved(there) as saved:
            y = checkpoint(run, x, use_reentrant=False, **options_of(kind, made))
            for tensor in kept_by(made):
                saved.note(tensor)
        y.sum().backward()
    return gemms.count - plain.count, saved.total / TOKENS


def kept_by(contexts: list[Any]) -> list[Tensor]:
    """What the contexts of a selective checkpoint keep."""
    if not contexts:
        return []
    if hasattr(contexts[1], "kept"):
        return contexts[1].kept
    entries = (entry for calls in contexts[1].storage.values() for entry in calls.values())
    leaves = torch.utils._pytree.tree_leaves(list(entries))
    values = (getattr(leaf, "val", None) for leaf in leaves)
    return [value for value in values if isinstance(value, Tensor)]


def compiled(kind: str, config: FP8Config) -> tuple[int, float]:
    """The same in a graph: what the forward's returns beside its arguments, and GEMMs of both."""
    _, _, run, x = forward_of(SIZES, config)
    gemms, results = [], []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        gemms.append(sum("scaled_mm" in str(node.target) for node in graph.graph.nodes))
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        nodes = (n for n in output.args[0] if isinstance(n, torch.fx.Node))
        inner = [n.meta["val"] for n in dict.fromkeys(nodes) if n.op != "placeholder"]
        results.append([v for v in inner if isinstance(v, Tensor)])
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    function = functools.partial(checkpoint, run, use_reentrant=False, **options_of(kind, []))
    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(x).sum().backward()
    # Without the state of the random generator, which has a size that tracing does not know.
    forward = [v for v in results[0] if all(isinstance(n, int) for n in v.shape)]
    size = sum(v.numel() * v.element_size() for v in forward) - x.numel() * x.element_size()
    return sum(gemms) - 21, size / TOKENS + SIZES["hidden_size"] * 2


def host_times(repetitions: int) -> dict[str, dict[str, float]]:
    """CPU microseconds by recipe and checkpoint, measured by `benchmarks.checkpoint_host_time`."""
    command = [sys.executable, "-m", "benchmarks.checkpoint_host_time", str(repetitions)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    times: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=200)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    about = {k: v for k, v in environment(torch.device("cpu")).items() if k in COLUMNS}
    bf16, rows, times = kept(SIZES, None), [], host_times(repetitions)
    for recipe in RECIPES:
        config = FP8Config(recipe=recipe)
        for kind in ("none", *CONTEXTS):
            modes = {"eager": eager} if kind == "none" else {"eager": eager, "compiled": compiled}
            for mode, measured in modes.items():
                row = {"checkpoint": kind, "recipe": recipe, "mode": mode, **about}
                if mode == "eager" and kind in times[recipe]:
                    row["host_us"] = round(times[recipe][kind])
                try:
                    again, size = measured(kind, config)
                    row |= {"gemms_again": again, "bytes_per_token": round(size, 1)}
                    row["share"] = round(size / bf16, 4)
                except RuntimeError as error:
                    row["error"] = str(error).strip().splitlines()[0][:150]
                rows.append({column: row.get(column, "") for column in COLUMNS})
    write_rows(RESULTS / "checkpoint_policies.csv", COLUMNS, rows)
    print_table(COLUMNS[:8], rows)


if __name__ == "__main__":
    main()
