"""Weights that are kept in FP8 between forwards without gradients, and cannot be stale."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import torch_fp8
from tests.internals import PayloadCache, SplitWeight, repeated_forward, split_parameter
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    memory_report,
    revert,
    rollout,
)
from torch_fp8.ops import scaled_mm

RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise"]


def _model(recipe="tensorwise", plain=False, **options):
    """Layers with weights in two halves, or with `plain` Parameters in BF16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64, bias=False), nn.GELU(), nn.Linear(64, 128))
    if plain:
        model.bfloat16()
    convert_to_float8(model, FP8Config(recipe=recipe, **options))
    for layer in () if plain else model[::2]:
        split_parameter(layer.weight)
    return model


def _train(model, seed=1):
    model.train()
    model(_x(seed)).float().square().mean().backward()


def _x(seed=0, rows=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 128, generator=generator).bfloat16()


@torch.no_grad()
def _evaluate(model, seed=0):
    return model(_x(seed))


@torch.no_grad()
def _fresh(model, seed=0):
    kept = [layer.fp8.payloads for layer in model[::2]]
    for layer in model[::2]:
        layer.fp8.payloads = PayloadCache(keeps_evaluation=False)
        layer.fp8.forget_quantizers()
    output = model(_x(seed))
    for layer, its in zip(model[::2], kept, strict=True):
        layer.fp8.payloads = its
        layer.fp8.forget_quantizers()
    return output


def _repeat(monkeypatch):
    monkeypatch.setattr(repeated_forward, "is_watched", lambda x: False)
    if not scaled_mm._CPU_HAS_OPERATOR:  # torch 2.11 has it for CUDA alone

        def product(a, b, *options):
            return scaled_mm._emulated(a, b.operand, *options)

        monkeypatch.setattr(scaled_mm, "_product", product)


@pytest.fixture(params=[False, True], ids=["long way", "repeated"])
def repeats(request, monkeypatch):
    if request.param:
        _repeat(monkeypatch)
    return request.param


def _kept(model):
    return [layer.fp8.payloads.payload is not None for layer in model[::2]]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_rollout_casts_each_weight_once(weight_casts, recipe, plain):
    model = _model(recipe, plain)
    for _ in range(2):
        weight_casts.clear()
        with rollout(model):
            for seed in range(6):
                _evaluate(model, seed)
            with rollout(model):  # of a library that the loop calls
                _evaluate(model)
            _evaluate(model)
            assert _kept(model) == [True, True]
        assert len(weight_casts) == 2
        assert _kept(model) == [False, False]


@pytest.mark.parametrize(("plain", "casts"), [(False, 2), (True, 12)])
def test_evaluation_keeps_weights_that_see_their_writes(weight_casts, plain, casts):
    model = _model("rowwise", plain).eval()
    for seed in range(6):
        _evaluate(model, seed)
    assert len(weight_casts) == casts
    assert _kept(model) == [not plain] * 2
    weight_casts.clear()
    for seed in range(6):
        _evaluate(model.train(), seed)
    assert len(weight_casts) == 12
    assert _kept(model) == [False, False]


@pytest.mark.parametrize("plain", [False, True])
def test_a_rollout_begins_with_what_was_written_before(plain):
    model = _model(plain=plain)
    outputs = []
    for _ in range(2):
        with rollout(model):
            outputs.append((_evaluate(model), _evaluate(model)))
        model[0].weight.data.mul_(2)
    assert torch.equal(*outputs[0])
    assert torch.equal(outputs[1][1], _evaluate(_doubled(_model(plain=plain))))


@torch.no_grad()
def _doubled(model):
    model[0].weight.mul_(2)
    return model.eval()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_have_the_same_bits(recipe, autocast, mode, repeats):
    if repeats and recipe not in ("delayed", *scaled_mm._CPU_NATIVE):
        pytest.skip("the CPU has no operator that multiplies these")
    model = _model(recipe)
    _train(model)
    model.eval()
    context = torch.autocast("cpu", torch.float16) if autocast else contextlib.nullcontext()
    for seed in range(3):
        with mode(), context:
            got, expected = model(_x(seed)), _fresh(model, seed)
        assert got.dtype == expected.dtype
        # The operator of the CPU multiplies dequantized operands, which autocast would round.
        assert (repeats and autocast) or torch.equal(got, expected)
    assert _kept(model) == [True, True]


def test_repeated_forwards_are_repeated(monkeypatch):
    _repeat(monkeypatch)
    model = _model().eval()
    _evaluate(model)
    monkeypatch.setattr(torch_fp8.nn.linear, "linear", None)
    assert torch.isfinite(_evaluate(model, 1)).all()
    with pytest.raises(TypeError):  # another dtype
        model(_x().double())


def _in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


WRITES = {
    "in place": _in_place,
    "data": lambda w: w.data.mul_(2),
    "as data": lambda w: setattr(w, "data", w.detach() * 2),
    "detach": lambda w: w.detach().view(-1).mul_(2),
    "view that was held": lambda w, held={}: held.setdefault(w, w.detach().view(-1)).mul_(2),
    "foreach": lambda w: torch._foreach_mul_([w.data], 2),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen(write, repeats):
    model = _model().eval()
    for seed in range(2):
        _evaluate(model, seed)
        before = _evaluate(model, seed)
        WRITES[write](model[2].weight)
        assert torch.equal(_evaluate(model, seed), _fresh(model, seed))
        assert not torch.equal(_evaluate(model, seed), before)


def test_loading_is_seen(repeats):
    model = _model().eval()
    other = {name: value * 0.5 for name, value in model.state_dict().items()}
    for assign in (False, True):
        before = _evaluate(model)
        model.load_state_dict(
            other if assign else {n: v * 4 for n, v in other.items()}, assign=assign
        )
        assert not torch.equal(_evaluate(model), before)
        assert torch.equal(_evaluate(model), _fresh(model))


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_an_optimizer_step_without_a_forward_is_seen(cache, converted, repeats):
    config = FP8Config(recipe="tensorwise", cache_weights=cache)
    model = _model(cache_weights=cache)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if converted:
        convert_optimizer(optimizer, config, model=model)
    _train(model)
    model.eval()
    for seed in range(2):
        before = _evaluate(model, seed)
        optimizer.step()
        assert not torch.equal(_evaluate(model, seed), before)
        assert torch.equal(_evaluate(model, seed), _fresh(model, seed))


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_frees_it(recipe):
    model = _model(recipe).eval()
    nothing = memory_report(model).caches
    _evaluate(model)
    assert _kept(model) == [True, True]
    counted = memory_report(model)
    payload = (3 if recipe == "blockwise" else 2) * 64 * 128  # the reference pads a block
    assert payload <= counted.caches - nothing <= payload + 4 * 2 * 128
    for free in (model.train, lambda: model(_x()), lambda: model.to(torch.bfloat16)):
        _evaluate(model.eval())
        assert _kept(model) == [True, True]
        free()
        assert _kept(model) == [False, False]


def test_reentrant_checkpoints_keep_nothing():
    model = _model().train()
    x = _x().requires_grad_()
    for _ in range(3):
        y = checkpoint(model, x, use_reentrant=True)
        assert _kept(model) == [False, False]
        y.float().sum().backward()
        assert _kept(model) == [False, False]


def test_delayed_scaling_sees_another_history(repeats):
    model = _model("delayed")
    _train(model)
    model.eval()
    _evaluate(model)
    for layer in model[::2]:
        history, last = layer.scaling_state
        layer.load_scaling_state(history * 16, last)
    assert torch.equal(_evaluate(model), _fresh(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_start_empty(copied):
    model = _model().eval()
    _evaluate(model)
    other = copied(model)
    assert _kept(other) == [False, False]
    _in_place(other[0].weight)
    assert torch.equal(_evaluate(model), _fresh(model))
    assert not torch.equal(_evaluate(other), _evaluate(model))


@pytest.mark.parametrize("scope", [contextlib.nullcontext, rollout])
def test_weights_that_fsdp_gathers_are_not_kept(single_process_group, weight_casts, scope):
    model = _model(plain=True, communication="off").eval()
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    with scope() if scope is contextlib.nullcontext else scope(model):
        for seed in range(3):
            _evaluate(model, seed)
        assert len(weight_casts) == 6
        assert _kept(model) == [False, False]


def test_it_can_be_turned_off_and_undone(weight_casts):
    model = _model(keep_eval_weights=False).eval()
    with rollout(model):
        for _ in range(3):
            _evaluate(model)
    assert len(weight_casts) == 6
    model = _model().eval()
    assert type(model[0].weight) is SplitWeight
    _evaluate(model)
    revert(model)
    assert type(model[0].weight) is nn.Parameter
    assert "fp8" not in model[0].__dict__
