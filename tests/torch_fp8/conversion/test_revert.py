import copy

import pytest
import torch
from torch import nn

from tests.steps import adamw
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, revert


@pytest.mark.parametrize("split", [True, False])
def test_revert_leaves_gradients_as_they_read(split):
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    config = FP8Config(opt_level="O3", split_weights=split, recipe="delayed")
    optimizer, _ = adamw(model, config)
    model(torch.randn(8, 64)).square().mean().backward()
    read = [p.grad.float() + 0.0 for p in model.parameters()]
    revert(model)
    assert {type(p.grad) for p in model.parameters()} == {torch.Tensor}
    for p, before in zip(model.parameters(), read, strict=True):
        assert torch.equal(p.grad.float(), before)
    optimizer.step()  # renews no scales any more


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
