"""Norms and gated MLPs that Liger Kernel has replaced; doubles have its names and formulas."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_fp8 import FP8Config, convert_to_float8, revert

SIZE, WIDTH = 32, 64
CALLS = []


def _ligers(module):
    """Decorate a class that stands for one of Liger Kernel's, and notes its calls."""

    def decorate(cls):
        forward = vars(cls)["forward"]

        def noted(self, x):
            CALLS.append(cls.__name__)
            return forward(self, x)

        noted.__module__ = cls.__module__ = f"liger_kernel.transformers.{module}"
        noted.__qualname__ = f"{cls.__name__}.forward"
        cls.forward = noted
        return cls

    return decorate


@_ligers("rms_norm")
class LigerRMSNorm(nn.Module):
    def __init__(self, offset=0.0, casting_mode="llama"):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, SIZE))
        self.variance_epsilon, self.offset, self.casting_mode = 1e-6, offset, casting_mode
        self.in_place, self.row_mode = True, None

    def forward(self, x):
        wide = x.float() if self.casting_mode != "none" else x
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (normal * (self.weight + self.offset)).to(x.dtype)


class _Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(SIZE, WIDTH, bias=False)
        self.up_proj = nn.Linear(SIZE, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, SIZE, bias=False)


class StockMLP(_Projections):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@_ligers("swiglu")
class LigerSwiGLUMLP(_Projections):
    def forward(self, x):
        return StockMLP.forward(self, x)


@_ligers("geglu")
class LigerGEGLUMLP(_Projections):
    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


@_ligers("swiglu")
class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(SIZE, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, SIZE, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class StockPhi3(LigerPhi3SwiGLUMLP):
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def _model(norm, mlp):
    torch.manual_seed(0)
    model = nn.Sequential(norm, mlp)
    norm.weight.data = torch.linspace(0.5, 1.5, SIZE)
    return model


def _patched():
    """A stock norm and MLP whose instances Liger has patched, as ``use_liger_kernel`` does."""
    model = _model(nn.RMSNorm(SIZE, 1e-6), StockMLP())
    for module, cls in zip(model, (LigerRMSNorm, LigerSwiGLUMLP), strict=True):
        module.forward = types.MethodType(cls.forward, module)
    model[0].variance_epsilon, model[0].offset, model[0].casting_mode = 1e-6, 0.0, "llama"
    return model


def _step(model):
    CALLS.clear()
    x = torch.randn(4, 24, SIZE, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.bfloat16())
    y.float().square().sum().backward()
    return y.detach(), [p.grad for p in model.parameters()]


MODELS = {
    "a patched instance": (_patched, StockMLP),
    "a class": (lambda: _model(LigerRMSNorm(), LigerSwiGLUMLP()), StockMLP),
    "one projection": (lambda: _model(LigerRMSNorm(), LigerPhi3SwiGLUMLP()), StockPhi3),
}


@pytest.mark.parametrize("name", MODELS)
def test_they_write_fp8_as_those_that_liger_replaces(name):
    make, mlp = MODELS[name]
    model, stock = make(), _model(nn.RMSNorm(SIZE, 1e-6), mlp())
    reports = [convert_to_float8(m, FP8Config("tensorwise")) for m in (model, stock)]
    assert reports[0].producers == reports[1].producers == ("0", "1")
    got, want = _step(model), _step(stock)
    assert not CALLS
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for report in (reports[0], convert_to_float8(model, FP8Config("tensorwise"))):
        assert (report.num_liger, report.num_liger_fused) == (0, 2)
        assert "  liger     2 of these run in place of Liger Kernel's" in report.summary()
    assert "liger " not in reports[1].summary()


def test_a_reverted_module_runs_ligers_kernel_again():
    model = _patched()
    convert_to_float8(model, FP8Config("tensorwise"))
    _step(copy.deepcopy(model))
    assert not CALLS
    revert(model)
    _step(model)
    assert CALLS == ["LigerRMSNorm", "LigerSwiGLUMLP"]


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gemmas_norm_adds_its_offset_to_the_weight(offset):
    model = _model(LigerRMSNorm(offset, "gemma"), LigerSwiGLUMLP())
    want = model[0](x := torch.randn(5, SIZE))
    report = convert_to_float8(model, FP8Config("tensorwise"))
    assert report.producers == ("0", "1")
    torch.testing.assert_close(model[0](x) + 0.0, want)


def test_what_has_another_formula_stays_ligers():
    for norm in (LigerRMSNorm(0.5), LigerRMSNorm(0.0, "none")):
        model = _model(norm, LigerGEGLUMLP())
        report = convert_to_float8(model, FP8Config("tensorwise"))
        assert report.producers == ()
        assert (report.num_liger, report.num_liger_fused) == (2, 0)
        assert "  liger     2 modules of Liger Kernel, whose outputs" in report.summary()
        _step(model)
        assert CALLS == ["LigerRMSNorm", "LigerGEGLUMLP"]
