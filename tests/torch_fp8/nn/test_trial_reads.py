"""Modules that a trial recognizes follow their attributes afterwards.

What a trial cannot show is not fused. These properties hold for norms, gated MLPs, experts and
linear layers.
"""

import contextlib
import copy
import pickle
import warnings
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.internals import (
    Float8RMSNorm,
    computes_linear,
    find_gate,
    find_gated_mlp,
    find_rms_norm,
    sqnr_db,
)
from tests.moe_experts import batch, experts, run
from tests.steps import gaussian
from torch_fp8 import FP8Config, convert_to_float8, revert


class Norm(nn.Module):
    doubled = False

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps, self.off, self.scale, self.dtype, self.cap = 1e-6, False, 1.0, torch.float32, 1e4

    def scaled(self, x):
        return x * self.scale

    def forward(self, x):
        if self.off:
            return x * self.weight
        y = x.to(self.dtype)
        y = self.scaled(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps))
        y = y * 2 if self.doubled else y
        return y.clamp(max=self.cap).to(x.dtype) * self.weight


class Silu(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = 1.0

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class MLP(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.n = size
        self.both = nn.Linear(size, 2 * size, bias=False)
        self.down = nn.Linear(size, size, bias=False)
        self.act = Silu()

    def forward(self, x):
        both = self.both(x)
        return self.down(self.act(both[..., : self.n]) * both[..., self.n :])


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _set(path, value):
    def change(module):
        *owners, name = path.split(".")
        setattr(module.get_submodule(".".join(owners)), name, value)

    return change


CHANGES = {
    "flag": (Norm, _set("off", True)),
    "factor": (Norm, _set("scale", 0.1)),
    "eps": (Norm, _set("eps", 99.0)),
    "clamp": (Norm, _set("cap", 0.3)),
    "dtype": (Norm, _set("dtype", torch.float64)),
    "method": (Norm, _set("scaled", lambda y: y * 3)),
    "size": (MLP, _set("n", 64)),
    "activation": (MLP, _set("act", nn.Softplus())),
    "attribute of the activation": (MLP, _set("act.beta", 8.0)),
    "forward of the activation": (MLP, _set("act.forward", F.softplus)),
}


def _pair(cls):
    torch.manual_seed(0)
    stock = nn.Sequential(cls(64), nn.Linear(64, 64))
    model = copy.deepcopy(stock)
    assert convert_to_float8(model, FP8Config(recipe="rowwise")).producers == ("0",)
    return stock, model


@pytest.mark.parametrize("case", CHANGES)
def test_an_attribute_that_changes_after_the_conversion_counts(case):
    """Where nothing compared them, results were 0.5 to 97 times the right ones off."""
    cls, change = CHANGES[case]
    for restored in (False, True):
        stock, model = _pair(cls)
        model = pickle.loads(pickle.dumps(model)) if restored else model
        x = 3 * gaussian(8, 64, dtype=torch.float32)
        before = model(x)
        change(stock[0])
        change(model[0])
        if case == "size":  # a size that no longer fits: the stock error, not the former result
            stock[0].n = model[0].n = 32
            for module in (stock, model):
                with _quiet(), pytest.raises(RuntimeError, match="must match"):
                    module(x)
            continue
        with _quiet():
            got = model(x)
        assert sqnr_db(stock(x), got) > 22.2  # up to three products with 28 dB each
        if case not in ("dtype", "clamp"):
            assert sqnr_db(before, got) < 20


def test_the_change_is_said_once_and_taken_by_the_next_conversion():
    model = nn.Sequential(OrderedDict(said=Norm(64), linear=nn.Linear(64, 64)))
    convert_to_float8(model, FP8Config(recipe="rowwise"))
    model[0].scale = 0.25
    with pytest.warns(UserWarning, match=r"'said' is not fused .* 'scale' has changed"):
        model(gaussian(8, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(gaussian(8, 64))
    assert convert_to_float8(model, FP8Config(recipe="rowwise")).producers == ()
    assert not isinstance(model[0], Float8RMSNorm)
    model[0].scale, model[0].eps = 1.0, 0.5
    assert convert_to_float8(model, FP8Config(recipe="rowwise")).producers == ("said",)
    assert model[0].fp8.spec.eps == 0.5
    assert revert(model) == 1
    assert type(model[0]) is Norm


def test_a_flag_of_the_class_counts():
    stock, model = _pair(Norm)
    x = gaussian(8, 64, dtype=torch.float32)
    Norm.doubled = True
    try:
        with _quiet():
            assert sqnr_db(stock(x), model(x)) > 25
    finally:
        Norm.doubled = False


def test_a_compiled_model_follows_and_stays_one_graph():
    stock, model = _pair(Norm)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = gaussian(8, 64, dtype=torch.float32)
    compiled(x)
    compiled(x)
    assert len(graphs) == 1
    stock[0].scale = model[0].scale = 0.125
    with _quiet():
        assert sqnr_db(stock(x), compiled(x)) > 25


def _norm(forward, **attributes):
    norm = type("Norm", (Norm,), {"forward": forward})(64)
    vars(norm).update(attributes)
    return norm


def _rms(x):
    return x.square().mean(-1, keepdim=True)


def _normed_by(self, x, rms):
    y = x.float()
    return (y * torch.rsqrt(rms(y) + self.eps)).to(x.dtype) * self.weight


def _normed(self, x):
    return _normed_by(self, x, _rms)


def _counts(self, x):
    self.calls = 1
    return _normed(self, x)


def _broken(self, x):
    raise RuntimeError


UNSHOWN = {
    "by mode": lambda self, x: _normed(self, x) if self.training else x * self.weight,
    "clamped input": lambda self, x: _normed(self, x.clamp(-1e4, 1e4)),
    "clamped weight": lambda self, x: _normed(self, x) / self.weight * self.weight.clamp(max=100),
    "tiny is zero": lambda self, x: _normed(self, torch.where(x.abs() < 1e-8, 0, x)),
    "of three dimensions": lambda self, x: _normed(self, x) * (2 if x.ndim == 3 else 1),
    "missing attribute": lambda self, x: _normed(self, x) * (2 if getattr(self, "a", 0) else 1),
    "missing for hasattr": lambda self, x: _normed(self, x) * (2 if hasattr(self, "a") else 1),
    "counts": _counts,
    "by list": lambda self, x: _normed(self, x) * self.options[0],
    "by dict of attributes": lambda self, x: _normed(self, x) * vars(self).get("factor", 1),
    "detached": lambda self, x: _normed_by(self, x, lambda y: _rms(y.detach())),
    "squared": lambda self, x: _normed(self, x) ** 2,
    "eps in another place": lambda self, x: _normed_by(self, x, lambda y: _rms(y).clamp(min=1e-4)),
    "broken": _broken,
}


@pytest.mark.parametrize("name", UNSHOWN)
def test_a_norm_that_may_compute_something_else_is_left(name):
    for forward, producers in ((UNSHOWN[name], ()), (_normed, ("0",))):
        model = nn.Sequential(_norm(forward, options=[1.0]), nn.Linear(64, 64))
        assert convert_to_float8(model).producers == producers


def test_a_gated_mlp_whose_activation_is_clamped_far_away_is_left():
    class Clamped(nn.Module):
        def forward(self, x):
            return F.silu(x).clamp(max=100)

    class Halves(nn.Module):
        def forward(self, x):
            return F.silu(x) if self.training else F.relu(x)

    for activation in (Clamped, Halves):
        mlp = MLP(64)
        mlp.act = activation()
        assert convert_to_float8(nn.Sequential(mlp)).producers == ()


EXPERTS = {
    "activation": ("plain", _set("act_fn", nn.Tanh())),
    "limit": ("gpt-oss", _set("limit", 0.5)),
    "alpha": ("gpt-oss", _set("alpha", 8.0)),
    "gate": ("plain", _set("_apply_gate", lambda rows: rows.chunk(2, -1)[0] * 3)),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_follow_their_attributes(case):
    layout, change = EXPERTS[case]
    torch.manual_seed(0)
    module = experts(layout)
    stock, tokens = copy.deepcopy(module), batch(32)
    convert_to_float8(module)
    assert module.fp8_gate is not None
    change(stock)
    change(module)
    with _quiet():
        assert sqnr_db(run(stock, *tokens)["y"], run(module, *tokens)["y"]) > 21


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trials_do_not_depend_on_the_gradient_mode(mode):
    norm, mlp = _norm(_normed), MLP(64)
    product = {"forward": lambda self, x: F.linear(x, self.weight, self.bias)}
    layer = type("Layer", (nn.Linear,), product)(32, 32)
    with mode():
        assert find_rms_norm(type("Other", (Norm,), {})(48)) is not None
        assert find_rms_norm(norm) is not None
        assert find_gated_mlp(mlp) is not None
        assert computes_linear(layer)
        assert find_gate(experts()) is not None


def test_a_limit_of_any_size_is_part_of_the_gate():
    module = experts("gpt-oss")
    module.limit = 100.0
    assert find_gate(module).spec.limit == 100.0
    plain = experts()
    plain._apply_gate = lambda rows: (
        F.silu(rows.chunk(2, -1)[0]).clamp(max=50) * rows.chunk(2, -1)[1]
    )
    assert find_gate(plain) is None


@pytest.mark.parametrize("size", [64, 128, 2880, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm, nn.RMSNorm])
def test_a_norm_is_found_at_every_size(cls, size):
    assert find_rms_norm(cls(size, eps=1e-6)) is not None
