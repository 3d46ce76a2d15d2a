"""Delayed scaling on Transformer Engine's own Python: which histories move, and when."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_fp8
from tests.steps import renew_scales
from tests.torch_fp8.nn.test_transformer_engine import DELAYED, Model, batch, layers, train
from torch_fp8 import FP8Config, convert_to_float8

pytestmark = [
    pytest.mark.transformer_engine,
    pytest.mark.parametrize("te", ["sources"], indirect=True),
]


def state():
    """What Transformer Engine keeps for the whole process."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager.quantization_state


def tracked(layer):
    """Transformer Engine's own histories and scales of a layer."""
    return layer.fp8.engine.linear.fp8_meta


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_take_the_histories_along(te, make):
    model = Model()
    convert_to_float8(model, DELAYED)
    train(model, steps=2)
    copied = make(model)
    for ours, theirs in zip(layers(copied), layers(model), strict=True):
        assert torch.equal(ours.scaling_state[0], theirs.scaling_state[0])
        assert ours.scaling_state[0].any()
    assert train(copied) == train(model)


@pytest.mark.parametrize("call", ["model", "parts"])
def test_histories_move_once_for_a_forward_and_a_backward(te, call):
    """A region for each layer would move them as often as there are layers."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2)))
    convert_to_float8(model, DELAYED)
    for step in range(3):
        x = torch.full((16, 32), float(step + 1))
        (model(x) if call == "model" else model[0](x)).sum().backward()
    first = model[0][0]
    history, _ = first.scaling_state
    assert history[0].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]
    assert (history[1:, :3] > 0).all()
    assert (history[:, 3:] == 0).all()
    assert tracked(first)["scaling_fwd"].scale[0] == pytest.approx(448 / 3)


def test_a_loop_that_calls_the_parts(te):
    """As a LightningModule's training_step: the model itself is never called."""
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))})
    convert_to_float8(model, DELAYED)
    for _ in range(2):
        model["a"](torch.ones(16, 32)).sum().backward()
    history, _ = model["a"][0].scaling_state
    assert (history > 0).sum(1).tolist() == [2, 2, 2]


def test_an_error_within_leaves_no_region_open(te):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_float8(model, DELAYED)
    with pytest.raises(ValueError, match="takes inputs"):
        model(torch.ones(16, 48))
    assert state().autocast_depth == 0
    assert not state().fp8_enabled
    model(torch.ones(16, 32)).sum().backward()
    history, _ = model[0].scaling_state
    assert history[0, 0] == 1


def test_activation_checkpointing_runs(te):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_float8(model, DELAYED)
    x = torch.ones(16, 32, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert state().autocast_depth == 0
    assert model[0].weight.grad.abs().sum() > 0


def test_evaluation_moves_no_history(te):
    model = Model()
    convert_to_float8(model, DELAYED)
    train(model, steps=2)
    before = torch_fp8.scaling_state_dict(model)
    with torch.no_grad():
        model.eval()(batch(9))
    after = torch_fp8.scaling_state_dict(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_scaling_state_resumes(te):
    model = Model()
    convert_to_float8(model, DELAYED)
    assert not any(v.any() for k, v in torch_fp8.scaling_state_dict(model).items() if "hist" in k)
    train(model, steps=5)
    weights, state = copy.deepcopy(model.state_dict()), torch_fp8.scaling_state_dict(model)
    assert state["up.amax_history"].shape == (3, 8)
    assert state["up.last_scale"].shape == (2,)
    model(batch(5)).sum().backward()
    uninterrupted = [layer.fp8.engine.linear.get_fp8_meta_tensors() for layer in layers(model)]
    resumed = Model()
    resumed.load_state_dict(weights)
    convert_to_float8(resumed, DELAYED)
    torch_fp8.load_scaling_state_dict(resumed, state)
    resumed(batch(5)).sum().backward()
    for layer, before in zip(layers(resumed), uninterrupted, strict=True):
        after = layer.fp8.engine.linear.get_fp8_meta_tensors()
        for key, tensors in before.items():
            torch.testing.assert_close(after[key], tensors, rtol=1e-5, atol=0)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("running", [False, True], ids=["before", "after a forward"])
def test_scaling_state_goes_from_one_backend_to_the_other(te, algorithm, running):
    """The next scales are those that our own delayed scaling takes from the same amaxes."""
    options = {"amax_history_len": 4, "amax_compute_algo": algorithm, "margin": 1}
    ours, theirs = (
        FP8Config(recipe="delayed", backend=backend, **options)
        for backend in ("torch", "transformer-engine")
    )
    model = nn.Sequential(nn.Linear(32, 32))
    convert_to_float8(model, ours)
    for size in (4.0, 1.0, 2.0):
        model(torch.full((16, 32), size)).sum().backward()
        renew_scales(*model.parameters())
    state = torch_fp8.scaling_state_dict(model)
    convert_to_float8(model, theirs)
    if running:
        model(torch.ones(16, 32))
    torch_fp8.load_scaling_state_dict(model, state)
    with torch.no_grad():
        model(torch.ones(16, 32))
    back = torch_fp8.scaling_state_dict(model)
    assert back["0.amax_history"].tolist() == state["0.amax_history"].tolist()
    amax = 4.0 if algorithm == "max" else 2.0
    scale = tracked(model[0])["scaling_fwd"].scale
    assert scale[0] == pytest.approx(448 / amax / 2)
    assert tracked(model[0])["scaling_bwd"].scale[0] == pytest.approx(57344 / 1.0 / 2)
    assert back["0.last_scale"][0] == pytest.approx(amax * 2 / 448)


def test_scaling_follows_the_weight_to_another_device(te):
    linear = nn.Linear(32, 32)
    model = nn.Sequential(linear)
    convert_to_float8(model, DELAYED)
    model(torch.ones(16, 32)).sum().backward()
    history, _ = linear.scaling_state
    engine = linear.fp8.engine
    linear.to(torch.float64).to(torch.float32)
    assert linear.fp8.engine is engine
    linear.to("meta")
    assert linear.fp8.engine is None
    assert torch.equal(linear.scaling_state[0], history)


def test_converting_twice_keeps_the_histories(te):
    model = Model()
    first = convert_to_float8(model, DELAYED)
    train(model, steps=2)
    engines = [layer.fp8.engine for layer in layers(model)]
    history = torch_fp8.scaling_state_dict(model)
    second = convert_to_float8(model, DELAYED)
    assert (first.converted, first.skipped) == (second.converted, second.skipped)
    assert all(a.fp8.engine is b for a, b in zip(layers(model), engines, strict=True))
    assert history.keys() == torch_fp8.scaling_state_dict(model).keys()
    assert all(torch.equal(history[k], v) for k, v in torch_fp8.scaling_state_dict(model).items())
    assert len(model._forward_pre_hooks) == 1


def test_scaling_is_taken_over_after_a_forward_that_failed(te, monkeypatch):
    linear = nn.Linear(32, 32)
    convert_to_float8(linear, DELAYED)
    state = {".amax_history": torch.full((3, 8), 7.0), ".last_scale": torch.ones(2)}
    with monkeypatch.context() as patch:
        patch.setattr(te.Linear, "forward", None)
        with pytest.raises(TypeError):
            linear(torch.ones(16, 32))
    torch_fp8.load_scaling_state_dict(linear, state)
    linear(torch.ones(16, 32)).sum().backward()
    history, _ = linear.scaling_state
    assert history[0].tolist() == [1, 7, 7, 7, 7, 7, 7, 0]
