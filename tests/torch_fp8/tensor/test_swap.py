"""Weights that change their form while torch.profiler refers to them, so that torch refuses."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile

import torch_fp8
from tests.internals import Halves, SplitTensor, SplitWeight, split_parameter, swappable
from tests.steps import adamw
from torch_fp8 import FP8Config

OPTIONS = {
    "shapes": {"record_shapes": True},
    "stack": {"with_stack": True},
    "memory": {"profile_memory": True},
}
X = torch.linspace(-1, 1, 8 * 64).view(8, 64)


@contextlib.contextmanager
def recording(name):
    with profile(activities=[ProfilerActivity.CPU], **OPTIONS[name]) as recorded:
        yield
    del recorded


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def convert(net, level="O2"):
    config = FP8Config(opt_level=level, recipe="tensorwise")
    return adamw(net, config, lr=1e-3)


def step(net, optimizer):
    before = values(net)
    net(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, value in values(net).items():
        assert not torch.equal(value, before[name]), name


def values(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def assert_equal(net, expected):
    for name, value in net.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_that_was_recorded_is_converted_and_trained(name):
    net = make()
    with recording(name):
        net(X)
        expected = values(net)
        referred = not swappable(net[0].weight)
        assert referred == (name != "memory")
        optimizer, report = convert(net, "O3")
        assert isinstance(net[0].weight, SplitWeight) != referred
        assert ("torch.profiler refers to them" in str(report)) == referred
        if referred:
            assert_equal(net, expected)
        step(net, optimizer)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("leave", ["restore_weights", "revert"])
def test_a_model_that_was_trained_while_recorded_is_left(name, leave):
    net = make()
    optimizer, _ = convert(net)
    parameter = net[0].weight
    with recording(name):
        step(net, optimizer)
        expected = values(net)
        referred = not swappable(parameter)
        told = pytest.warns(UserWarning, match=r"2 of 2 weights.*torch\.profiler")
        with told if referred else contextlib.nullcontext():
            if leave == "revert":
                torch_fp8.revert(net)
            else:
                assert torch_fp8.restore_weights(optimizer) == (0 if referred else 2)
        assert_equal(net, expected)
        step(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    expected = values(net)
    torch_fp8.revert(net)
    assert type(parameter) is nn.Parameter
    assert net[0].weight is parameter
    assert_equal(net, expected)


def test_conversion_does_not_have_a_profiler_refer_to_weights():
    with recording("shapes"):
        layer = nn.Linear(64, 64)
        layer.weight = nn.Parameter(torch.ones(64, 64))
        split_parameter(layer.weight)
        assert swappable(layer.weight)
        net = make()
        for linear in (net[0], net[2]):
            linear.weight = nn.Parameter(linear.weight.data)
        convert(net)
        assert isinstance(net[0].weight, SplitWeight)


CHANGES = {
    "parametrization": lambda net: parametrize.register_parametrization(
        net[0], "weight", Doubled()
    ),
    "dtype": lambda net: net.double(),
    "swap": lambda net: torch.utils.swap_tensors(net[0].weight, nn.Parameter(torch.ones(64, 64))),
    "meta": lambda net: net.to("meta"),
}


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2

    def right_inverse(self, weight):
        return weight / 2


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_torch_refuses_leaves_the_weight(name):
    net = make()
    optimizer, _ = convert(net)
    with recording("shapes"):
        step(net, optimizer)
        weight, expected = net[0].weight, net[0].weight.detach().clone()
        with pytest.raises(RuntimeError) as refused:
            CHANGES[name](net)
        assert "torch.profiler" in str(refused.value.__cause__ or refused.value)
        assert type(weight) is SplitWeight
        assert torch.equal(weight.detach().clone(), expected)
    if name not in ("parametrization", "meta"):  # torch leaves the module half changed
        step(net, optimizer)


def test_a_recorded_weight_moves_to_another_device():
    parameter = split_parameter(nn.Parameter(torch.randn(64, 64)))
    expected, seen = parameter.detach().clone(), []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with recording("shapes"):
        parameter.square().sum().backward()
        grad = parameter.grad
        assert not swappable(parameter)
        moved = SplitTensor(parameter.halves.mapped(torch.clone))
        parameter.become(moved)
        assert type(parameter) is SplitWeight
        assert parameter.halves is moved.halves
        assert torch.equal(parameter.grad, grad)
        parameter.grad = None
        assert torch.equal(parameter.detach().clone(), expected)
        parameter.square().sum().backward()
        assert torch.equal(parameter.grad, seen[0])
        assert len(seen) == 2


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_are_frozen_and_thawed_while_recorded(name):
    net = make().requires_grad_(False)
    with recording(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net(X)
        torch_fp8.freeze(net)
        frozen = net[0].weight
        expected = frozen.dequantize()
        net(X)
        assert torch.equal(net.state_dict()["0.weight"].float(), expected.float())
        torch_fp8.thaw(net)
        assert type(net[0].weight) is nn.Parameter
        assert torch.equal(net[0].weight, expected.float())
        net(X)


def test_a_conversion_that_fails_halfway_splits_nothing(monkeypatch):
    net, of, calls = make(), Halves.of, []

    def fail_once(weight, bits):
        calls.append(bits)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return of(weight, bits)

    monkeypatch.setattr(Halves, "of", staticmethod(fail_once))
    expected = values(net)
    config = FP8Config(recipe="tensorwise")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch_fp8.convert_to_float8(net, config)
    with pytest.raises(MemoryError):
        torch_fp8.convert_optimizer(optimizer, config, model=net)
    assert [type(p) for p in net.parameters()] == [nn.Parameter] * 4
    for name, value in net.state_dict().items():  # rounded to 8 bits below BF16
        assert torch.allclose(value, expected[name], rtol=2**-16, atol=0)
    step(net, optimizer)
    torch_fp8.convert_optimizer(optimizer, config, model=net)
    assert isinstance(net[2].weight, SplitWeight)
    step(net, optimizer)
