"""Compiled layers: torch.compile sees one operator of ours where a GEMM is, and nothing inside."""

import pytest
import torch
from torch._dynamo import trace_rules
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from tests.models import llama
from torch_fp8 import Float8Linear, FP8Config, convert_to_float8
from torch_fp8.ops.quantize import QuantizedTensor, quantize
from torch_fp8.ops.scaled_mm import scaled_matmul
from torch_fp8.quantization.recipe import RECIPES, make_recipe

CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
RULES = ("torch._scaled_mm", "torch._scaled_mm_v2", "torch.nn.functional.scaled_mm")


@pytest.fixture
def no_rule(monkeypatch):
    """Dynamo knows torch's scaled matmul by no name, as torch 2.11 does not know its newest one."""
    for rules in trace_rules.torch_name_rule_map:
        for name in rules.keys() & set(RULES):
            monkeypatch.delitem(rules, name)
    trace_rules.get_torch_obj_rule_map.cache_clear()
    torch._dynamo.reset()
    yield
    monkeypatch.undo()
    trace_rules.get_torch_obj_rule_map.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_a_layer_is_one_graph_whatever_dynamo_knows(no_rule, recipe_name):
    layer = torch.nn.Sequential(torch.nn.Linear(64, 48))
    convert_to_float8(layer, FP8Config(recipe=recipe_name))
    x = torch.randn(32, 64, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    assert isinstance(layer[0], Float8Linear)
    assert all(t.grad is not None for t in (x, *layer.parameters()))


@pytest.mark.long
def test_layers_compiled_one_by_one_share_one_graph_without_a_break(no_rule):
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = llama(intermediate_size=160, num_hidden_layers=4)
    convert_to_float8(model, FP8Config())
    backend = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=backend)
    tokens = torch.randint(64, (2, 16))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert backend.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_a_graph_has_our_operator_alone(recipe_name):
    recipe, seen = make_recipe(recipe_name), []
    a, b = quantize(torch.randn(32, 64), recipe.input), quantize(torch.randn(48, 64), recipe.weight)

    def multiply(qdata, scale, other, other_scale):
        left = QuantizedTensor(qdata, scale, recipe.input.granularity)
        right = QuantizedTensor(other, other_scale, recipe.weight.granularity)
        return scaled_matmul(left, right, torch.bfloat16)

    def backend(graph, inputs):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    compiled = torch.compile(multiply, backend=backend, fullgraph=True)
    made = compiled(a.qdata, a.scale, b.qdata, b.scale)
    assert seen == ["torch_fp8.scaled_mm.default"]
    assert torch.equal(made, scaled_matmul(a, b, torch.bfloat16))


@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 17, 33)], ids=str)
@pytest.mark.parametrize("recipe_name", ["tensorwise", "blockwise"])
def test_the_operator_keeps_torchs_rules(recipe_name, shape):
    """All that `opcheck` tries, but what multiplies its FP8 arguments, which torch does not."""
    (m, k, n), recipe = shape, make_recipe(recipe_name)
    a, b = quantize(torch.randn(m, k), recipe.input), quantize(torch.randn(n, k), recipe.weight)
    arguments = (*a, *b, k, torch.randn(n, dtype=torch.bfloat16), torch.bfloat16, True, False)
    torch.library.opcheck(torch.ops.torch_fp8.scaled_mm.default, arguments, test_utils=CHECKS)


def test_flops_are_counted():
    recipe = make_recipe("blockwise")
    a, b = quantize(torch.randn(32, 64), recipe.input), quantize(torch.randn(48, 64), recipe.weight)
    with FlopCounterMode(display=False) as counter:
        torch.ops.torch_fp8.scaled_mm(*a, *b, 64, None, torch.float32, False, False)
    assert counter.get_total_flops() == 2 * 32 * 64 * 48
