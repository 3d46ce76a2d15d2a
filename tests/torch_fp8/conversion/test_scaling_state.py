import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import torch_fp8
from tests.internals import links
from tests.tied_model import Model
from torch_fp8 import FP8Config, convert_to_float8, revert


def test_scaling_state_resumes_exactly():
    config = FP8Config(recipe="delayed", amax_history_len=8)
    torch.manual_seed(1)
    model = Model()
    batches = [torch.randint(48, (2, 24)) for _ in range(6)]

    def train(model, batches):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for tokens in batches:
            optimizer.zero_grad()
            model(tokens).logsumexp(-1).mean().backward()
            optimizer.step()
        return model

    convert_to_float8(model, config)
    uninterrupted = train(copy.deepcopy(model), batches)
    half = train(model, batches[:3])
    weights, scaling = half.state_dict(), torch_fp8.scaling_state_dict(half)
    assert all(type(t) is torch.Tensor and t.dtype == torch.float32 for t in scaling.values())
    resumed = Model()
    convert_to_float8(resumed, config)
    resumed.load_state_dict(weights)
    torch_fp8.load_scaling_state_dict(resumed, scaling)
    train(resumed, batches[3:])
    for a, b in zip(uninterrupted.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    histories = [model.layers[0]["up"].fp8_amax_history for model in (uninterrupted, resumed)]
    assert torch.equal(*histories)


def test_scaling_state_does_not_depend_on_wrappers_around_a_module():
    def made(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(3)))
        if wrap:
            model[0] = torch.compile(model[0], backend="eager")
            model[1][0] = checkpoint_wrapper(torch.compile(model[1][0], backend="eager"))
        convert_to_float8(model, FP8Config(recipe="delayed"))
        return model

    plain, wrapped = made(wrap=False), made(wrap=True)
    plain(torch.randn(16, 32)).sum().backward()
    state = torch_fp8.scaling_state_dict(plain)
    torch_fp8.load_scaling_state_dict(wrapped, state)
    again = torch_fp8.scaling_state_dict(wrapped)
    assert all(torch.equal(value, again[key]) for key, value in state.items())
    assert again.keys() == state.keys()
    of_names = {key.replace("0.0.", "0._orig_mod.0."): value for key, value in state.items()}
    torch_fp8.load_scaling_state_dict(plain, of_names)  # as they were written before


def test_scaling_state_of_another_model_is_refused_whole():
    model = Model()
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=8))
    model(torch.arange(48).view(2, 24))
    state = torch_fp8.scaling_state_dict(model)
    fresh = Model()
    convert_to_float8(fresh, FP8Config(recipe="delayed", amax_history_len=8))
    state[links.STATE_KEY] = torch.ones(len(links.KINDS), dtype=torch.uint8)
    wrong = {**state, "layers.1.down.amax_history": torch.zeros(3, 9)}
    with pytest.raises(ValueError, match=r"layers\.1\.down\.amax_history.*amax_history_len"):
        torch_fp8.load_scaling_state_dict(fresh, wrong)
    missing = dict(list(state.items())[1:])
    with pytest.raises(ValueError, match="in the model, not in the state"):
        torch_fp8.load_scaling_state_dict(fresh, missing)
    assert (fresh.layers[0]["up"].fp8_amax_history == 0).all()
    assert fresh not in links._saved
    torch_fp8.load_scaling_state_dict(fresh, {})
    other = Model()
    convert_to_float8(other)
    assert torch_fp8.scaling_state_dict(other) == {}
    torch_fp8.load_scaling_state_dict(other, state)


def test_buffers_that_the_user_keeps_from_broadcasts_stay_so():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    own = ["1.running_mean"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    for recipe in ("delayed", "delayed", "tensorwise", "delayed"):
        convert_to_float8(model, FP8Config(recipe=recipe))
        ignored = model._ddp_params_and_buffers_to_ignore
        assert "1.running_mean" in ignored
        assert any(".fp8_" in name for name in ignored) == (recipe == "delayed")
    revert(model)
    assert model._ddp_params_and_buffers_to_ignore == own
