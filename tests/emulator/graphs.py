"""Runs compiled graphs on an emulated card, with whole operators and with their kernels.

It prints, as JSON, where their results differ.

Run by test_graphs.py in a process of its own, as steps.py is. A small model's graphs are traced as
for a card, once with operators that become their kernels and once with operators that stay whole,
and run node by node: torch's operators on the CPU, all of ours emulated.

    python -m tests.emulator.graphs "llama tensorwise" "experts blockwise"
"""

import contextlib
import json
import sys
from collections import Counter
from typing import Any
from unittest import mock

from tests.emulator.card_process import steps  # noqa: F401  # before torch_fp8

# isort: split
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops import triton_kernel_wrap
from torch._prims_common import clone_preserve_strides
from torch.fx import GraphModule, Interpreter
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.compiled_graphs import traced_for_card
from tests.emulator.place import on_card
from tests.emulator.scaled_gemm import exact_product
from tests.emulator.steps import card
from tests.golden.training import LLAMA, batch, llama
from tests.internals import halves_of
from tests.internals import kernels_rms_norm as norm_kernels
from torch_fp8 import Float8Linear, FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.ops import registry, rms_norm
from torch_fp8.ops import scaled_mm as products


class OnCard(Interpreter):
    """Runs a graph; modes of torch's dispatcher that emulate a card do not know launches in it."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.torch_fp8.scaled_grouped_mm.default:
            with on_card(False):
                return super().call_function(target, args, kwargs)
        if target is not triton_kernel_wrap.triton_kernel_wrapper_functional:
            return super().call_function(target, args, kwargs)
        cloned = kwargs["tensors_to_clone"]
        given = {
            k: clone_preserve_strides(x) if k in cloned else x for k, x in kwargs["kwargs"].items()
        }
        options = {k: x for k, x in kwargs.items() if k not in ("tensors_to_clone", "kwargs")}
        triton_kernel_wrap.triton_kernel_wrapper_mutation_dense(**options, kwargs=given)
        return {k: given[k] for k in cloned}


def experts() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**LLAMA | {"num_hidden_layers": 1}, **sizes)).train()


MODELS = {"llama": llama, "experts": experts}


def train(case: str, visible: bool) -> tuple[dict[str, Tensor], Counter[str], Counter[str], int]:
    """Return losses and gradients, launches by kernel, our operators in graphs, and their number.

    A "dynamic" case has texts of two lengths, which one graph serves. Weights with "payloads" bring
    them. Scales of delayed scaling are known, and too small for some values.
    """
    name, recipe, *more = case.split()
    lengths, model = (37, 8) if (dynamic := "dynamic" in more) else (32,), MODELS[name]()
    payloads = "payloads" in more
    level = {"opt_level": "O2", "cache_weights": True} if payloads else {"opt_level": "O1"}
    config = FP8Config(recipe=recipe, **level)
    convert_to_float8(model, config)
    if payloads:
        convert_optimizer(torch.optim.AdamW(model.parameters()), config, model=model)
        for halves in filter(None, map(halves_of, model.parameters())):
            halves.current_payload(halves.cast)
    for layer in (m for m in model.modules() if isinstance(m, Float8Linear) and m.fp8.scaling):
        layer.load_scaling_state(torch.full_like(layer.scaling_state[0], 0.25), torch.empty(0))
    launches: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    graphs: list[GraphModule] = []

    def compiler(module: GraphModule, examples: Any) -> Any:
        graphs.append(module)
        for node in module.graph.nodes:
            if getattr(node.target, "namespace", "") == "torch_fp8":
                operators[node.target._schema.name] += 1

        def run(*inputs: Any) -> Any:
            with card() as emulation, mock.patch.object(products, "_emulated", exact_product):
                results = OnCard(module).run(*inputs)
            launches.update(launched.name for launched in emulation.launches)
            launches["sums"] += sum("ADD=True" in each.variant for each in emulation.launches)
            return results

        return make_boxed_func(run)

    torch.compiler.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(traced_for_card())
        stack.enter_context(mock.patch.object(norm_kernels, "MULTIPROCESSORS", 1))
        if not visible:
            apart = mock.patch("torch_fp8.nn.rms_norm.addends_in_graph", return_value=())
            stack.enter_context(apart)
            stack.enter_context(mock.patch.object(registry, "is_visible", return_value=False))
            # In visible graphs it is torch's operators, which add in another order.
            reference = rms_norm.rms_norm_backward.reference
            stack.enter_context(mock.patch.object(norm_kernels, "rms_norm_backward", reference))
        backend = aot_autograd(fw_compiler=compiler)
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
        results = {}
        for tokens in lengths:
            ids = batch(0, tokens, 0).contiguous()
            with torch.autocast("cpu", torch.bfloat16):
                loss = compiled(input_ids=ids, labels=ids).loss
            loss.backward()
            results[f"loss {tokens}"] = loss.detach()
    results |= {name: p.grad for name, p in model.named_parameters()}
    results |= dict(model.named_buffers())  # slots of delayed scaling
    return results, launches, operators, len(graphs)


def compare(case: str) -> dict[str, Any]:
    results, launches, operators, graphs = train(case, visible=True)
    expected, of_whole, whole, _ = train(case, visible=False)
    of_whole["sums"] = sums = launches["sums"]  # apart in graphs of whole operators
    return {
        "sums": sums,
        "unequal": [name for name, x in expected.items() if not torch.equal(results[name], x)],
        "same launches": launches == of_whole,
        "operators": operators,
        "whole operators": whole,
        "graphs": graphs,
    }


if __name__ == "__main__":
    json.dump({case: compare(case) for case in sys.argv[1:]}, sys.stdout)
