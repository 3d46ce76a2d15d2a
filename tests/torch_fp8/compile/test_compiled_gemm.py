import pytest
import torch
from torch._dynamo import trace_rules

from tests.internals import RECIPES, make_recipe
from torch_fp8 import Float8Linear, FP8Config, convert_to_float8
from torch_fp8.ops.quantize import quantize

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


@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 17, 33)], ids=str)
@pytest.mark.parametrize("recipe_name", ["tensorwise", "blockwise"])
def test_the_operator_keeps_torchs_rules(recipe_name, shape):
    """All that `opcheck` tries, but what multiplies its FP8 arguments, which torch does not."""
    (m, k, n), recipe = shape, make_recipe(recipe_name)
    a, b = quantize(torch.randn(m, k), recipe.input), quantize(torch.randn(n, k), recipe.weight)
    arguments = (*a, *b, k, torch.randn(n, dtype=torch.bfloat16), torch.bfloat16, True, False)
    torch.library.opcheck(torch.ops.torch_fp8.scaled_mm.default, arguments, test_utils=CHECKS)
