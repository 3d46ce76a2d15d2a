"""Graphs of a rollout read weights that were cast before; the next casts into their place."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.internals import (
    WeightQuantizer,
    linear_function,
    linear_in_graph,
    payload_cache,
    served_in_graph,
)
from torch_fp8 import FP8Config, convert_to_float8, freeze, rollout

RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise"]


def _model(recipe="rowwise", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64, bias=False), nn.GELU(), nn.Linear(64, 128))
    convert_to_float8(model.bfloat16(), FP8Config(recipe=recipe, **options))
    return _step(model)


def _x(rows=1):
    return torch.randn(2, rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()


def _step(model):
    model.train()
    model(_x(3)).float().square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad.sign() * 0.01)
    model.zero_grad()
    return model


@torch.no_grad()
def _expected(model):
    return copy.deepcopy(model).eval()(_x())


def _kept(model):
    return [layer.fp8.payloads for layer in model[::2]]


def _in_scope(model):
    """A copy whose layers have cast their weights in a rollout of its own, which goes on."""
    other = copy.deepcopy(model)
    for layer in other[::2]:
        layer.fp8.payloads.begin_scope(layer.weight)
    other(_x())
    return other


@pytest.fixture
def casts(spy):
    return spy(WeightQuantizer, "for_fprop", lambda _, weight: tuple(weight.shape))


@pytest.fixture
def capture(monkeypatch):
    """``capture(model)``: a forward while a CUDA graph is captured, as far as our code can tell."""
    capturing = []
    monkeypatch.setattr(payload_cache, "is_capturing", lambda weight: bool(capturing))

    @torch.no_grad()
    def captured(model):
        capturing.append(True)
        y = model(_x())
        capturing.clear()
        return y

    return captured


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cuda_graph_reads_the_weights_of_each_rollout(capture, casts, recipe):
    model = _model(recipe)
    with rollout(model), torch.no_grad():
        expected = model(_x())
        casts.clear()
        assert torch.equal(capture(model), expected)
        assert torch.equal(model(_x()), expected)
        assert casts == []
        read = [kept.payload for kept in _kept(model)]
    for _ in range(2):
        _step(model)
        codes = [payload.qdata.clone().view(torch.uint8) for payload in read]
        assert [kept.payload for kept in _kept(model)] == [None, None]
        casts.clear()
        with rollout(model), torch.no_grad():
            assert sorted(casts) == [(64, 128), (128, 64)]  # before any forward
            now = _in_scope(model)
            for payload, before, fresh in zip(read, codes, _kept(now), strict=True):
                assert not torch.equal(payload.qdata.view(torch.uint8), before)
                for part, wanted in zip(payload[:2], fresh.payload[:2], strict=True):
                    assert torch.equal(part.float(), wanted.float())
            casts.clear()
            assert torch.equal(model(_x()), _expected(model))
            assert [kept.payload.qdata.data_ptr() for kept in _kept(model)] == [
                payload.qdata.data_ptr() for payload in read
            ]
    model.float()
    assert [kept.captured for kept in _kept(model)] == [None, None]


def test_graphs_that_go_with_the_rollout_hold_nothing(capture):
    model = _model()
    with rollout(model, keep_graphs=False), torch.no_grad():
        model(_x())
        capture(model)
        assert all(kept.captured is not None for kept in _kept(model))
    assert [tensor for kept in _kept(model) for tensor in kept.tensors] == []


def test_a_graph_casts_the_weight_itself_where_it_may_change(capture, casts):
    model = _model().eval()
    with torch.no_grad():
        model(_x())
    casts.clear()
    assert torch.equal(capture(model), _expected(model))
    assert len(casts) == 2 + 2  # of the copy, too
    model = _model()
    with rollout(model):
        casts.clear()
        capture(model)
        assert len(casts) == 2
        assert [kept.captured for kept in _kept(model)] == [None, None]


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_compiled_decode_reads_what_was_cast_once(casts, monkeypatch, recipe):
    said = []
    monkeypatch.setattr(linear_function, "warn_of_decoding", lambda: said.append(1))
    model = _model(recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    places = set()
    for _ in range(3):
        casts.clear()
        with rollout(model, compiled=True), torch.no_grad():
            assert len(casts) == 2  # at once
            places.add(tuple(layer.fp8.served[0].data_ptr() for layer in model[::2]))
            made = [compiled(_x()) for _ in range(2)]
            assert len(casts) == 2
            assert all(torch.equal(y, _expected(model)) for y in made)
            assert counter.frame_count == 1
        assert all(layer.fp8.served is None for layer in model[::2])
        _step(model)
    assert len(places) == 1  # CUDA graphs would read there
    (graph,) = counter.graphs
    called = [node.target for node in graph.graph.nodes]
    assert called.count(served_in_graph) == 2
    assert linear_in_graph not in called
    assert said == []
    with torch.no_grad():  # outside the graph casts as ever
        assert torch.equal(compiled.eval()(_x()), _expected(model))
    assert said


def test_layers_that_keep_nothing_are_left_alone():
    for model in (_model(keep_eval_weights=False), _model(eval_fp8=False), nn.Linear(4, 4)):
        with rollout(model, compiled=True), torch.no_grad():
            model(torch.ones(1, 4) if isinstance(model, nn.Linear) else _x())
        assert all(module.training for module in model.modules())
    frozen = _model("blockwise")
    freeze(frozen)
    with rollout(frozen, compiled=True), torch.no_grad():
        assert all(layer.fp8.served is None for layer in frozen[::2])
        assert torch.equal(frozen(_x()), _expected(frozen))
