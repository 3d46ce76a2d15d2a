"""What Dynamo is told of a layer's result, without running it, is what the layer then returns."""

import contextlib

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.internals import linear_in_graph, member_in_graph, served_in_graph
from tests.torch_fp8.block_models import MLP
from torch_fp8 import FP8Config, convert_to_float8, freeze, rollout

SIZE = 64
AUTOCAST = torch.autocast("cpu", torch.bfloat16)


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(SIZE), MLP(SIZE, 96, bias=True)
        self.odd, self.inner = Conv1D(48, SIZE), inner

    def forward(self, x):
        with self.inner:
            return self.odd(self.mlp(self.norm(x)))


class Checked(torch.fx.Interpreter):
    def __init__(self, graph):
        super().__init__(graph)
        self.seen = []

    def run_node(self, n):
        result, known = super().run_node(n), n.meta.get("example_value")
        if isinstance(known, torch.Tensor):
            assert _facts(result) == _facts(known), n.format_node()
            self.seen.append(n.target)
        return result


def _facts(x):
    return x.shape, x.dtype, x.stride(), x.requires_grad, x.device


def _check(model, x, calls, fullgraph=True):
    """Compile `model` and run it; `calls`: how many calls of a linear layer its graph has."""
    checked = []

    def backend(graph, inputs):
        checked.append(Checked(graph))
        return checked[-1].run

    torch.compiler.reset()
    expected = model(x)
    made = torch.compile(model, backend=backend, fullgraph=fullgraph)(x)
    assert _facts(made) == _facts(expected)
    (one,) = checked
    of_layers = linear_in_graph, member_in_graph, served_in_graph
    assert sum(target in of_layers for target in one.seen) == calls
    assert len(one.seen) > calls


def _model(recipe, inner=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = Block(inner or contextlib.nullcontext()).to(dtype)
    convert_to_float8(model, FP8Config(recipe=recipe))
    return model


def _x(dtype=torch.float32, requires_grad=True):
    return torch.randn(2, 16, SIZE, dtype=dtype, requires_grad=requires_grad)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_in_training(recipe):
    _check(_model(recipe, dtype=torch.bfloat16), _x(torch.bfloat16), 4)


@pytest.mark.parametrize("place", ["within the graph", "around it"])
def test_where_autocast_is_on(place):
    within = place == "within the graph"
    model = _model("tensorwise", AUTOCAST if within else None)
    with contextlib.nullcontext() if within else AUTOCAST:
        _check(model, _x(), 4)
        assert model(_x()).dtype == torch.bfloat16


@pytest.mark.parametrize("trained", ["input", "weights", "one bias", "nothing"])
def test_where_not_all_take_gradients(trained):
    model = _model("tensorwise").requires_grad_(trained == "weights")
    model.mlp.down_proj.bias.requires_grad_(trained == "one bias")
    _check(model, _x(requires_grad=trained == "input"), 4)


def test_without_gradients():
    model = _model("delayed")
    model(_x()).sum().backward()
    with torch.no_grad():
        _check(model.eval(), _x(requires_grad=False), 4)


def test_in_a_rollout():
    model = _model("tensorwise").eval()
    with rollout(model, compiled=True), torch.no_grad():
        _check(model, _x(requires_grad=False), 4)


def test_a_frozen_base():
    model = _model("tensorwise", dtype=torch.bfloat16)
    model.requires_grad_(False)
    freeze(model)
    _check(model, _x(torch.bfloat16), 0, fullgraph=False)


def test_another_number_of_tokens_of_a_dynamic_graph():
    model, seen = _model("tensorwise"), []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for tokens in (16, 23, 5):
        assert compiled(torch.randn(2, tokens, SIZE)).shape == (2, tokens, 48)
    assert len(seen) == 1
