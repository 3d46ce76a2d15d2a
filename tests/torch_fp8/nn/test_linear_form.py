import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from torch_fp8 import Float8Linear, FP8Config, convert_to_float8, revert
from torch_fp8.nn.linear_form import computes_linear


class Inherits(nn.Linear):
    """Says of itself what nn.Linear does not."""

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


class Flag(nn.Linear):
    """What nn.Linear computes only as long as `enabled` is false."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.enabled = False

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y.round() if self.enabled else y


class Adapter(nn.Linear):
    """As loralib's: an adapter within."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lora_A = nn.Parameter(torch.zeros(4, self.in_features))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Casts(nn.Linear):
    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class FakeQuant(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(torch.float8_e4m3fn).to(x.dtype), self.bias)


class TwoInputs(nn.Linear):
    def forward(self, x, scale=None):
        return F.linear(x, self.weight, self.bias)


class DropsBias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight)


@pytest.mark.parametrize("cls", [Inherits, Falcon, Calls])
def test_a_subclass_that_computes_the_same_keeps_its_class(cls):
    model = nn.Sequential(cls(32, 48, bias=False), nn.GELU(), cls(48, 32))
    parameters = list(model.parameters())
    report = convert_to_float8(model, FP8Config(recipe="delayed"))
    assert report.converted == ("0", "2")
    for layer in (model[0], copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0]):
        assert isinstance(layer, cls)
        assert isinstance(layer, Float8Linear)
        assert type(layer).__name__ == cls.__name__
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


@pytest.mark.parametrize("cls", [Flag, Adapter, Casts, FakeQuant, TwoInputs, DropsBias])
def test_a_subclass_that_computes_or_may_compute_something_else_is_left(cls):
    model = nn.ModuleList([cls(32, 32), nn.Linear(32, 32)])
    report = convert_to_float8(model)
    assert report.converted == ("1",)
    assert dict(report.skipped) == {"0": f"{cls.__name__} does not compute what nn.Linear does"}
    assert type(model[0]) is cls


def test_the_trial_leaves_random_states_and_runs_without_data():
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert computes_linear(Falcon(32, 32))
        assert not computes_linear(FakeQuant(32, 32))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sharded_subclass_is_converted(single_process_group):
    model = nn.Sequential(Falcon(32, 48), Falcon(48, 32))
    fully_shard(model[0])
    fully_shard(model)
    convert_to_float8(model)
    assert isinstance(model[0], FSDPModule)
    assert isinstance(model[0], Falcon)
    assert isinstance(model[0], Float8Linear)
    model(torch.randn(4, 32)).sum().backward()
    assert revert(model) == 2
    assert type(model[1]) is Falcon
    assert type(model[0]).__bases__ == (FSDPModule, Falcon)
