"""Test tensors whose parts lie in memory that processes share."""

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

import torch_fp8
from tests.steps import adamw
from torch_fp8 import FP8Config, freeze


def _trained(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer, _ = adamw(model, FP8Config(**{"recipe": "tensorwise", **options}), lr=1e-2)
    for step in range(2):
        model(torch.randn(8, 64)).square().mean().backward()
        if not step:
            optimizer.step()
    return model, optimizer


def _moment(name):
    model, optimizer = _trained()
    return optimizer.state[model[0].weight][name]


def _frozen():
    layer = nn.Sequential(nn.Linear(64, 128))
    freeze(layer)
    return layer[0].weight


TENSORS = {
    "stock": lambda: nn.Parameter(torch.randn(128, 64)),
    "split": lambda: _trained()[0][0].weight,
    "alias": lambda: _trained()[0][0].weight.detach(),
    "frozen": _frozen,
    "wide gradient": lambda: _trained()[0][0].weight.grad,
    "8-bit gradient": lambda: _trained(opt_level="O3")[0][0].weight.grad,
    "first moment": lambda: _moment("exp_avg"),
    "second moment": lambda: _moment("exp_avg_sq"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_shared_by_its_parts(kind):
    tensor = TENSORS[kind]()
    before = tensor.detach().clone()
    assert not tensor.is_shared()
    assert tensor.share_memory_() is tensor
    assert tensor.is_shared()
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("kind", TENSORS)
def test_processes_share_what_is_sent(kind):
    tensor = TENSORS[kind]()
    received = pickle.loads(ForkingPickler.dumps(tensor))
    assert type(received) is type(tensor)
    assert received.requires_grad == tensor.requires_grad
    assert isinstance(received, nn.Parameter) == isinstance(tensor, nn.Parameter)
    assert torch.equal(received, tensor)
    with torch.no_grad():
        received.mul_(2.0)
    assert torch.equal(received, tensor)


@pytest.mark.parametrize("kind", ["split", "frozen"])
def test_a_view_is_sent_as_it_reads(kind):
    tensor = TENSORS[kind]()
    for view in (tensor[:4].detach(), tensor.detach().t(), tensor.detach().view(2, -1)):
        assert torch.equal(pickle.loads(ForkingPickler.dumps(view)), view)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_that_is_sent_follows_writes(frozen):
    if frozen:
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        freeze(model)
    else:
        model = _trained()[0]
    received = pickle.loads(ForkingPickler.dumps(model))
    x = torch.randn(8, 64)
    with torch.no_grad():
        before = received(x)
        for parameter in model.parameters():
            parameter.mul_(2.0)
        assert torch.equal(received(x), model(x))
        assert not torch.equal(received(x), before)
    received.load_state_dict(model.state_dict())


def test_weights_in_memory_that_processes_share_stay_there():
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).share_memory()
    others = pickle.loads(ForkingPickler.dumps(model))
    optimizer, report = adamw(model, FP8Config(recipe="tensorwise"), lr=1e-2)
    assert report.num_split == 0
    assert report.why_float32 == "sharing memory with other processes"
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    for mine, other in zip(model.parameters(), others.parameters(), strict=True):
        assert torch.equal(mine, other)


def _written(model, received):
    for mine, other in zip(model.parameters(), received.parameters(), strict=True):
        mine.data.mul_(4.0)
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("recipe", "cache"),
    [("tensorwise", False), ("tensorwise", True), ("rowwise", True), ("blockwise", True)],
)
def test_nothing_is_cached_of_a_weight_that_another_process_trains(cache, recipe):
    model, optimizer = _trained(cache_weights=cache, recipe=recipe)
    x = torch.randn(8, 64)
    received = pickle.loads(ForkingPickler.dumps(model))
    for training in (False, True, False):
        received.train(training), model.train(training)
        with torch.set_grad_enabled(training):
            assert torch.equal(received(x), model(x))
            _written(received, model)
            assert torch.equal(received(x), model(x))
            _written(model, received)
            assert torch.equal(received(x), model(x))
    with torch_fp8.rollout(model), torch_fp8.rollout(received), torch.no_grad():
        before = received(x)
        assert torch.equal(before, model(x))
        _written(model, received)
        assert torch.equal(received(x), model(x))
        assert not torch.equal(received(x), before)
    alias = received[0].weight.detach()
    stale = alias.untyped_storage()
    _written(model, received)
    joined = torch.empty(0).set_(received[0].weight.detach().untyped_storage())
    assert torch.equal(joined, model[0].weight.detach().clone().flatten())
    del stale
    with pytest.warns(UserWarning, match="outside the memory shared"):
        optimizer.step()
    model.eval(), received.eval()
    with torch.no_grad():
        assert torch.equal(model(x), received(x))  # layers multiply by the shared upper half


@pytest.mark.filterwarnings("ignore:FP8. an optimizer step stores the lower half")
def test_delayed_scales_follow_another_process():
    model, optimizer = _trained(recipe="delayed")
    x = torch.randn(8, 64)
    received = pickle.loads(ForkingPickler.dumps(model)).eval()
    with torch.no_grad():
        received(x)
    for _ in range(3):
        model(x * 100).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        assert torch.equal(received(x), model(x))


@pytest.mark.parametrize("kind", TENSORS)
def test_inference_mode_reads_aliases_and_views(kind):
    tensor = TENSORS[kind]()
    with torch.inference_mode():
        tensors = [tensor.detach(), tensor.detach().detach(), tensor.view(-1), tensor[:4]]
        assert all(not x.is_inference() for x in tensors)
        assert torch.equal(tensors[0], tensor)
        assert torch.equal(tensors[2], tensor.reshape(-1))
    tensors[0].mul_(2.0)
    assert torch.equal(tensors[0], tensor)
    assert torch.equal(tensors[3], tensor[:4])


def test_a_gradient_that_inference_mode_has_read_takes_writes():
    weight = _trained()[0][0].weight
    with torch.inference_mode():
        norm = weight.grad.detach().norm()
    weight.grad.mul_(2.0)
    assert torch.equal(weight.grad.norm(), 2 * norm)
