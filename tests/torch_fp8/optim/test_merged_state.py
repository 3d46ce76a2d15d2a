import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.fp8_checkpoints import LiveStorages
from tests.internals import Float8FrozenWeight, stored
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    freeze,
    merged_state_dict,
    stream_state_dict,
)


def net(layers=4, width=128):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def test_a_stream_of_a_frozen_model_is_its_state_dict():
    model = net()
    model.register_buffer("steps", torch.zeros(3))
    freeze(model, FP8Config(recipe="tensorwise"))
    state, streamed = model.state_dict(), dict(stream_state_dict(model))
    assert list(streamed) == list(state)
    for key, value in state.items():
        assert type(streamed[key]) is torch.Tensor
        assert streamed[key].dtype == value.dtype
        assert torch.equal(streamed[key], value)
    streamed["steps"].add_(1)
    assert model.steps.sum() == 0, "it is a copy"


def test_a_stream_of_a_trained_model_has_the_residuals():
    model = net()
    model[0].requires_grad_(False)
    config = FP8Config(recipe="tensorwise", frozen_weights="fp8")
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    convert_optimizer(optimizer, config, model=model)
    model(torch.randn(8, 128)).sum().backward()
    optimizer.step()
    merged = merged_state_dict(model, optimizer)
    assert {v.dtype for v in merged.values()} == {torch.float32}
    streamed = dict(stream_state_dict(model, optimizer, torch.float32))
    assert list(streamed) == list(merged)
    assert all(torch.equal(streamed[key], merged[key]) for key in merged)
    own = dict(stream_state_dict(model, optimizer))
    assert own["0.weight"].dtype == torch.bfloat16
    assert own["1.weight"].dtype == torch.float32
    assert all(torch.equal(own[key].float(), merged[key]) for key in merged)
    assert {type(value) for value in own.values()} == {torch.Tensor}
    assert torch.equal(own["1.weight"], model[1].weight)
    assert not torch.equal(own["1.weight"], stored(model[1].weight).float())
    without = dict(stream_state_dict(model))  # the residual is the weight's, not the optimizer's
    assert all(torch.equal(without[key], own[key]) for key in own)
    kept = own["1.weight"].clone()
    with torch.no_grad():
        model[1].weight.zero_()
    assert torch.equal(own["1.weight"], kept), "it is a copy"


def test_a_tied_weight_is_one_tensor_under_both_names():
    model = nn.ModuleDict({"embedding": nn.Embedding(128, 64), "head": nn.Linear(64, 128)})
    model["head"].weight = model["embedding"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    convert_optimizer(optimizer, model=model)
    merged = merged_state_dict(model, optimizer)
    assert list(merged) == ["embedding.weight", "head.weight", "head.bias"]
    assert merged["embedding.weight"] is merged["head.weight"]


def test_a_stream_of_a_model_of_the_users_in_bf16_has_the_residuals():
    model = net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    convert_optimizer(optimizer, model=model)
    model(torch.randn(8, 128).bfloat16()).sum().backward()
    optimizer.step()
    merged = merged_state_dict(model, optimizer)
    own = dict(stream_state_dict(model, optimizer))
    assert {v.dtype for v in own.values()} == {torch.float32}
    assert all(torch.equal(own[key], merged[key]) for key in merged)
    assert not torch.equal(own["1.weight"], model[1].weight.float())
    below = (own["1.weight"] - model[1].weight).abs()
    assert (below <= 2**-8 * model[1].weight.abs()).all()  # half of BF16's spacing


def test_who_reads_one_after_the_other_holds_one():
    model = net(layers=16, width=256)
    freeze(model, FP8Config(recipe="tensorwise"))
    one = 2 * 256 * 256
    with LiveStorages() as storages:
        list(map(len, model.parameters()))
        before = storages.alive
        for _, value in stream_state_dict(model):
            del value
    assert storages.peak - before <= 16 * (256 * 256 + 2048) + 4 * one, "the bytes, and one weight"
    with LiveStorages() as storages:
        state = model.state_dict()
    assert storages.peak > 16 * one
    assert len(state) == 32


def test_kept_variables_are_the_parameters():
    model = net()
    freeze(model, FP8Config(recipe="tensorwise"))
    state = model.state_dict(keep_vars=True)
    assert isinstance(state["0.weight"], Float8FrozenWeight)
    assert state["0.weight"] is model[0].weight


def test_a_sharded_model_is_refused(single_process_group):
    model = net()
    fully_shard(model)
    with pytest.raises(ValueError, match=r"'0\.weight' is sharded"):
        next(stream_state_dict(model))
