import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.internals import SplitWeight
from tests.steps import adamw
from torch_fp8 import FP8Config


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5

    def right_inverse(self, weight):
        return weight * 2


class Positive(nn.Module):
    def forward(self, weight):
        return weight.abs()


REGISTER = {
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "halved": lambda layer: parametrize.register_parametrization(layer, "weight", Halved()),
    "positive": lambda layer: parametrize.register_parametrization(layer, "weight", Positive()),
}


def make(level):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    optimizer, _ = adamw(net, FP8Config(opt_level=level), lr=1e-3)
    return net, optimizer


def step(net, optimizer):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = (net(x) - x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("name", REGISTER)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("alive", [False, True], ids=["", "the graph of a step alive"])
def test_the_parameter_stays_split_and_has_its_hooks(name, level, alive):
    net, optimizer = make(level)
    graphs = [step(net, optimizer)]
    if not alive:
        graphs.clear()
    weight, seen = net[0].weight, []
    weight.register_hook(lambda grad: seen.append(grad.dtype))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    weight.decayed = True
    expected = weight.detach().clone()
    REGISTER[name](net[0])
    assert net[0].parametrizations.weight.original is weight
    assert type(weight) is SplitWeight
    assert weight.decayed
    if name == "halved":
        assert torch.equal(weight.detach().clone(), expected * 2)
    step(net, optimizer)
    assert seen == [torch.float32, "accumulated"]
    with torch.no_grad():
        left = net.eval()[0].weight.clone()
    parametrize.remove_parametrizations(net[0], "weight")
    assert net[0].weight is weight
    assert type(weight) is SplitWeight
    assert torch.equal(weight.detach().clone(), left)
    seen.clear()
    net.train()
    before = weight.detach().clone()
    step(net, optimizer)
    assert seen == [torch.float32, "accumulated"]
    assert not torch.equal(weight.detach().clone(), before)


def test_a_gradient_of_other_values_is_dropped():
    net, _ = make("O2")
    weight = net[0].weight
    net(torch.ones(1, 64)).sum().backward()
    parametrize.register_parametrization(net[0], "weight", Halved())
    assert weight.grad is None


def test_two_parameters_that_live_are_swapped():
    net, _ = make("O2")
    weight, other = net[0].weight, nn.Parameter(torch.ones(96, 64))
    before = weight.detach().clone()
    for _ in range(2):  # there and back again
        torch.utils.swap_tensors(weight, other)
        assert torch.equal(weight, torch.ones(96, 64))
        assert torch.equal(other.detach().clone(), before)
        torch.utils.swap_tensors(other, weight)
    assert type(weight) is SplitWeight
    assert torch.equal(weight.detach().clone(), before)


LATER = {
    **REGISTER,
    "weight_norm": parametrizations.weight_norm,
    "older weight_norm": nn.utils.weight_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_layer_whose_weight_is_computed_is_evaluated(name, level):
    net, optimizer = make(level)
    LATER[name](net[0])
    x = torch.randn(8, 64)
    for _ in range(2):
        step(net, optimizer)
        outputs = []
        for mode in (net.train, net.eval):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                outputs.append(mode()(x))
        assert torch.equal(*outputs)
