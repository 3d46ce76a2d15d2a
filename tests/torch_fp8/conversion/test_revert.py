"""`revert` gives a stock model back."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.tied_model import Model
from torch_fp8 import (
    Float8Linear,
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    revert,
)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_revert_leaves_stock_modules(recipe):
    model, stock = Model(), Model()
    stock.load_state_dict(model.state_dict())
    convert_to_float8(model, FP8Config(recipe=recipe))
    assert revert(model) == 4
    assert revert(model) == 0
    for ours, theirs in zip(model.modules(), stock.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert ours.__dict__.keys() == theirs.__dict__.keys()
    tokens = torch.arange(48).view(2, 24)
    assert torch.equal(model(tokens), stock(tokens))


def test_revert_leaves_plain_gradients():
    """At O3 too, whose hooks quantize them; the optimizer goes on, and both are converted again."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    twin = copy.deepcopy(model)
    config = FP8Config(opt_level="O3")
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, twin)]
    x = torch.randn(8, 64)

    def step(model, optimizer):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for each, optimizer in zip((model, twin), optimizers, strict=True):
        convert_to_float8(each, config)
        convert_optimizer(optimizer, config, model=each)
        step(each, optimizer)
    model(x).square().mean().backward()
    assert {type(p.grad) for p in model.parameters()} > {torch.Tensor}
    revert(model)
    for _ in range(2):
        assert {type(p.grad) for p in model.parameters()} == {torch.Tensor}
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        model.zero_grad()
        optimizers[0].step()
        model(x).square().mean().backward()
    model.zero_grad()
    convert_to_float8(model, config)
    convert_optimizer(optimizers[0], config, model=model)
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        step(each, optimizer)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.detach().clone(), theirs.detach().clone())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_graph_from_before_revert_delivers_its_gradients(level):
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    convert_to_float8(model)
    twin = copy.deepcopy(model)
    for each, chosen in ((model, level), (twin, "O2")):
        optimizer = torch.optim.AdamW(each.parameters())
        convert_optimizer(optimizer, FP8Config(opt_level=chosen), model=each)
    x = torch.randn(8, 64)
    losses = [each(x).square().mean() for each in (model, twin)]
    revert(model)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (type(ours.grad), ours.grad.dtype) == (torch.Tensor, torch.float32)
        assert torch.equal(ours.grad, theirs.grad.clone())


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("order", ["shard-first", "convert-first"])
def test_fsdp2_modules_are_converted_and_reverted(order):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    twin = copy.deepcopy(model)
    convert_to_float8(twin)

    def shard():
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    if order == "shard-first":
        shard()
        parameters = list(model.parameters())
        assert convert_to_float8(model).converted == ("0", "1")
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    else:
        convert_to_float8(model)
        shard()
    assert isinstance(model[0], Float8Linear)
    assert isinstance(model[0], FSDPModule)
    x = torch.randn(8, 32)
    y = model(x)
    assert torch.equal(y, twin(x))
    y.sum().backward()
    twin(x).sum().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), twin[0].weight.grad)
    assert convert_to_float8(model).converted == ("0", "1")
    assert revert(model) == 2
    assert not isinstance(model[0], Float8Linear)
    assert isinstance(model[0], FSDPModule)
    model(x)
