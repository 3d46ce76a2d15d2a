import copy
import pickle

import pytest
import torch
from torch import nn

from tests.steps import adamw
from torch_fp8 import FP8Config, freeze

X = torch.linspace(-1, 1, 8 * 64).view(8, 64)


def make(level, recipe):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer, _ = adamw(net, FP8Config(opt_level=level, recipe=recipe), lr=1e-2)
    backward(net)
    optimizer.step()
    return net, optimizer


def backward(net):
    with torch.autocast("cpu", torch.bfloat16):
        net(X).float().square().mean().backward()
    assert all(p.grad.float().norm() > 0 for p in net.parameters())


def set_data(net, optimizer):
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.5
    return net


def move(net, optimizer):
    return net.to("cpu").double().float()


UNTRAINED = {
    "copied": lambda net, optimizer: copy.deepcopy(net),
    "pickled": lambda net, optimizer: pickle.loads(pickle.dumps(net)),
    "data": set_data,
    "moved": move,
}
"""What torch trains under autocast until an optimizer's step."""


@pytest.mark.parametrize(("level", "recipe"), [("O1", "tensorwise"), ("O3", "delayed")])
@pytest.mark.parametrize("name", UNTRAINED)
def test_gradients_flow(name, level, recipe):
    net, optimizer = make(level, recipe)
    with torch.inference_mode():
        other = UNTRAINED[name](net, optimizer)
        other.zero_grad()
    backward(other)
    with torch.inference_mode():
        other.eval()(X)
    backward(other.train())


def load_model(net, optimizer):
    net.load_state_dict({key: 0.5 * value for key, value in net.state_dict().items()})


def load_optimizer(net, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def step(net, optimizer):
    optimizer.step()


TRAINED = {"model loaded": load_model, "optimizer loaded": load_optimizer, "stepped": step}


@pytest.mark.parametrize(("level", "recipe"), [("O1", "tensorwise"), ("O3", "delayed")])
@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_on(name, level, recipe):
    net, optimizer = make(level, recipe)
    with torch.inference_mode():
        TRAINED[name](net, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        before = net[0].weight.detach().clone()
        backward(net)
        optimizer.step()
        assert not torch.equal(net[0].weight.detach().clone(), before)


def test_a_copy_of_split_weights_is_stepped():
    net, _ = make("O2", "tensorwise")
    with torch.inference_mode():
        other = copy.deepcopy(net[0].weight)
    assert not other.is_inference()
    with torch.no_grad():
        other.mul_(2.0)
    assert torch.equal(other.detach().clone(), net[0].weight.detach() * 2.0)


def test_a_copy_of_a_frozen_layer_passes_gradients_on():
    net, _ = make("O2", "tensorwise")
    freeze(net)
    with torch.inference_mode():
        other = copy.deepcopy(net)
    x = X.clone().requires_grad_()
    other(x).sum().backward()
    assert x.grad.norm() > 0


@pytest.mark.parametrize("name", ["to", "reshape", "contiguous", "flatten", "type_as", "matmul"])
def test_operators_that_autograd_decomposes_read_a_weight(name):
    """Inference mode passes them on whole, so that they looked like views."""
    weight = make("O2", "tensorwise")[0][0].weight
    call = {
        "to": lambda w: w.to("cpu", torch.float64),
        "reshape": lambda w: w.reshape(-1, 8),
        "contiguous": lambda w: w.t().contiguous(),
        "flatten": lambda w: w.flatten(),
        "type_as": lambda w: w.type_as(torch.ones(1, dtype=torch.float16)),
        "matmul": lambda w: w.matmul(w.t()),
    }[name]
    with torch.no_grad():
        expected = call(weight.detach().clone())
    with torch.inference_mode():
        result = call(weight)
        assert result.dtype == expected.dtype
        assert torch.equal(result.clone(), expected)
        assert torch.Tensor.to(weight, torch.device("cpu")) is weight
