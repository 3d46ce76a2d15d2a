import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.internals import computes_linear
from torch_fp8 import Float8Linear, FP8Config, convert_to_float8, revert


class Inherits(nn.Linear):
    extra = "kept"

    def describe(self):
        return f"{self.extra} {self.out_features}"


class Falcon(nn.Linear):
    """As transformers' FalconLinear."""

    def forward(self, input):
        hidden_states = input @ self.weight.T
        if self.bias is None:
            return hidden_states
        return hidden_states + self.bias


class Calls(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class OfTwoBases(Inherits, nn.Linear):
    """As a class of ``fully_shard`` has them."""


class Adapter(nn.Linear):
    """As loralib's: an adapter within."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lora_A = nn.Parameter(torch.zeros(4, self.in_features))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def _product(self, x):
    return F.linear(x, self.weight, self.bias)


def _of(forward):
    return type("Layer", (nn.Linear,), {"forward": forward, "factor": 1, "enabled": False})


OTHERS = {
    "a flag": lambda self, x: _product(self, x).round() if self.enabled else _product(self, x),
    "a factor of the class": lambda self, x: _product(self, x) * self.factor,
    "a missing attribute": lambda self, x: _product(self, x) * getattr(self, "twice", 1),
    "a cast": lambda self, x: _product(self, x.to(self.weight.dtype)),
    "fake quantization": lambda self, x: F.linear(
        x, self.weight.to(torch.float8_e4m3fn).to(x.dtype), self.bias
    ),
    "two inputs": lambda self, x, scale=None: _product(self, x),
    "no bias": lambda self, x: F.linear(x, self.weight),
    "a clamp": lambda self, x: _product(self, x).clamp(-1e3, 1e3),
    "tiny is zero": lambda self, x: _product(self, torch.where(x.abs() < 1e-7, 0, x)),
    "a gradient": lambda self, x: _Scaled.apply(_product(self, x)),
    "a detached input": lambda self, x: _product(self, x.detach()),
}
CLASSES = {name: _of(forward) for name, forward in OTHERS.items()} | {"an adapter": Adapter}


@pytest.mark.parametrize("cls", [Inherits, Falcon, Calls, OfTwoBases])
def test_a_subclass_that_computes_the_same_keeps_its_class(cls):
    model = nn.Sequential(cls(32, 48, bias=False), nn.GELU(), cls(48, 32))
    parameters = list(model.parameters())
    report = convert_to_float8(model, FP8Config(recipe="delayed"))
    assert report.converted == ("0", "2")
    for layer in (model[0], copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0]):
        assert isinstance(layer, cls)
        assert isinstance(layer, Float8Linear)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(layer), name) == getattr(cls, name)
    if cls is Inherits:
        assert model[0].describe() == "kept 48"
    plain = nn.Sequential(nn.Linear(32, 48, bias=False), nn.GELU(), nn.Linear(48, 32))
    plain.load_state_dict(model.state_dict())
    convert_to_float8(plain, FP8Config(recipe="delayed"))
    x = torch.randn(20, 32)
    assert torch.equal(model(x), plain(x))
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert revert(model) == 2
    assert type(model[0]) is cls


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_a_subclass_that_computes_or_may_compute_something_else_is_left(cls):
    same = _of(lambda self, x: F.linear(x, self.weight, self.bias))
    model = nn.ModuleList([cls(32, 32), same(32, 32)])
    report = convert_to_float8(model)
    assert report.converted == ("1",)
    assert dict(report.skipped) == {"0": f"{cls.__name__} does not compute what nn.Linear does"}
    assert type(model[0]) is cls


def test_the_trial_leaves_random_states_and_runs_without_data():
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert computes_linear(Falcon(32, 32))
        assert not computes_linear(CLASSES["fake quantization"](32, 32))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("converted_first", [False, True])
def test_a_sharded_subclass_is_converted(converted_first, single_process_group):
    model = nn.Sequential(Falcon(32, 48), Falcon(48, 32))
    if converted_first:
        convert_to_float8(model)
    fully_shard(model[0])
    fully_shard(model)
    assert convert_to_float8(model).converted == ("0", "1")
    assert isinstance(model[0], FSDPModule)
    assert isinstance(model[0], Falcon)
    assert isinstance(model[0], Float8Linear)
    assert type(model[0]).__name__ == "FSDPFalcon"
    with pytest.raises(AssertionError, match="deepcopy"):  # as FSDP2 has it
        copy.deepcopy(model[0])
    model(torch.randn(4, 32)).sum().backward()
    assert revert(model) == 2
    assert type(model[1]) is Falcon
    assert type(model[0]).__bases__ == (FSDPModule, Falcon)
    model(torch.randn(4, 32)).sum().backward()
