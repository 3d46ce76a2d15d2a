import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.internals import is_paused, pause, resume
from tests.steps import renew_scales
from tests.torch_fp8.monitor.test_faults import Watched, _outlier_channel
from torch_fp8 import Float8Linear, FP8Config, convert_to_float8, revert

pytestmark = pytest.mark.filterwarnings("ignore:FP8 monitor, step")


def _paused(model):
    return [name for name, module in model.named_modules() if is_paused(module)]


def test_a_paused_layer_is_the_linear_layer_that_it_was():
    layer, stock = nn.Linear(64, 96), nn.Linear(64, 96)
    stock.load_state_dict(layer.state_dict())
    convert_to_float8(layer, FP8Config(recipe="delayed"))
    x = torch.randn(16, 64)
    in_fp8 = layer(x)
    layer(100 * x)
    renew_scales()
    pause(layer)
    pause(layer)
    assert isinstance(layer, Float8Linear)
    assert type(layer).__name__ == "Float8Linear"
    assert torch.equal(layer(x), stock(x))
    assert copy.deepcopy(layer)(x).equal(stock(x))
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    resume(layer)
    assert not is_paused(layer)
    assert torch.equal(layer(x), in_fp8)  # with an empty history, as at first
    pause(layer)
    convert_to_float8(layer, FP8Config(recipe="rowwise"))
    assert not is_paused(layer)
    pause(layer)
    revert(layer)
    assert type(layer) is nn.Linear


def test_a_layer_falls_back_returns_and_waits_twice_as_long():
    watched = Watched(recipe="tensorwise", on_alarm="bf16", fallback_steps=3)
    healthy = watched.in_x
    paused = {}
    for step in range(1, 18):
        if step in (2, 7, 8):  # it waits from the last alarm on
            _outlier_channel(watched)
        else:
            watched.in_x = healthy
        watched.step()
        paused[step] = "0" in _paused(watched.model)
    assert [s for s in paused if paused[s]] == [2, 3, 4, *range(7, 14)]
    kinds = [(e["step"], e["event"]) for e in watched.monitor.events if e["layer"] == "0"]
    assert kinds == [(2, "fallback"), (5, "return"), (7, "fallback"), (14, "return")]
    assert any("0 runs BF16: fp8/0/input/" in text for text in watched.said)
    assert "2 fallback, 2 return" in watched.monitor.summary()


def test_an_aligned_mlp_takes_its_down_projection_to_a_finer_recipe():
    watched = Watched(on_alarm="rowwise", fallback_steps=50)
    watched.step()
    with torch.no_grad():
        watched.model[1].up_proj.weight[7] = watched.model[1].gate_proj.weight[7]
    watched.step()
    recipes = [m.fp8.recipe for m in (watched.model[0], watched.model[1].down_proj)]
    assert [recipe.name for recipe in recipes] == ["delayed", "rowwise"]
    watched.step()  # norms and MLPs hand over what each layer casts
    assert watched.logged[3]["fp8/1.down_proj/input/sqnr"] > 25
    watched.monitor.close()
    assert watched.model[1].down_proj.fp8.recipe.name == "delayed"


def test_the_state_goes_through_json_and_is_applied():
    watched = Watched(recipe="tensorwise", on_alarm="bf16", fallback_steps=3)
    watched.step()
    _outlier_channel(watched)
    watched.step()
    state = json.loads(json.dumps(watched.monitor.state_dict()))
    fallen = _paused(watched.model)
    assert "0" in fallen
    resumed = Watched(recipe="tensorwise", on_alarm="bf16", fallback_steps=3)
    resumed.monitor.load_state_dict(state)
    assert _paused(resumed.model) == fallen
    assert resumed.monitor.step == 2
    assert "still out of FP8 at step 2" in resumed.said[-1]
    for _ in range(3):
        resumed.step()
    assert _paused(resumed.model) == []
    resumed.monitor.load_state_dict({})  # of a checkpoint without a monitor
    assert resumed.monitor.step == 5


def test_a_state_that_is_loaded_is_saved_again_as_it_was():
    watched = Watched(recipe="tensorwise", on_alarm="bf16", fallback_steps=9)
    _outlier_channel(watched)
    for _ in range(20):
        watched.step()
    state = json.loads(json.dumps(watched.monitor.state_dict()))
    assert all(state[name] for name in ("step", "losses", "fallen", "times"))
    state["times"] = dict.fromkeys(state["times"], 3)
    resumed = Watched(recipe="tensorwise", on_alarm="bf16", fallback_steps=9)
    resumed.monitor.load_state_dict({**state, "all_until": 30})  # of version 0.1.0
    assert json.loads(json.dumps(resumed.monitor.state_dict())) == state


def test_a_closure_is_measured_before_the_update():
    watched = Watched(opt_level="O1")
    amaxes, losses = [], []
    for step in range(1, 4):

        def closure():
            loss = watched.model(torch.randn(32, 64)).square().mean()
            loss.backward()
            watched.monitor.observe_loss(loss)
            losses.append(loss.item())
            return loss

        amaxes.append(watched.model[0].weight.detach().abs().max().item())
        assert watched.optimizer.step(closure) == losses[-1]
        watched.optimizer.zero_grad()
        assert watched.logged[step]["fp8/0/weight/amax"] == amaxes[-1]
        assert watched.logged[step]["fp8/loss"] == pytest.approx(losses[-1])
    assert len(set(amaxes)) == 3


def test_nothing_is_measured_where_ranks_run_out_of_inputs_one_by_one():
    watched = Watched(recipe="tensorwise")
    watched.step()
    joining = SimpleNamespace(_join_config=SimpleNamespace(enable=True))
    watched.monitor._ddp = lambda: joining
    with pytest.warns(RuntimeWarning, match="measures nothing from step 2 on: within .*join"):
        watched.step()
    watched.step()
    assert list(watched.logged) == [1]
    assert not any(layer.fp8.observer for _, layer in watched.monitor._layers)
