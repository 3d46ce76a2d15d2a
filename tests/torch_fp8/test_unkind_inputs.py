import copy
import functools
import itertools

import pytest
import torch
from torch import nn

from tests.torch_fp8.block_models import MLP
from torch_fp8 import FP8Config, convert_to_float8

MODES = {
    "gradients": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
CASTS = (None, torch.bfloat16, torch.float16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(64, eps=1e-6), nn.LayerNorm(64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.k.weight = self.q.weight
        self.v.requires_grad_(False)
        self.mlp = MLP(64, 40, bias=True)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.q(h) * torch.sigmoid(self.k(h)) + self.v(h)
        return x + self.mlp(self.mlp_norm(x))


def _odd():
    return nn.Sequential(nn.Linear(64, 37), nn.Linear(37, 5))


def _inputs():
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    nan, inf = x[:, :64].clone(), x[:, :64].clone()
    nan[2, 3], inf[2, 3] = torch.nan, torch.inf
    yield from {
        "plain": x.reshape(2, 9, 64),
        "no tokens": x[:0, :64],
        "no tokens of several rows": x.reshape(2, 9, 64)[:, :0],
        "one token": x[0, :64],
        "transposed": x.reshape(64, 18).t(),
        "strided": x[:, ::2],
        "expanded": x[:1, :64].expand(5, 64),
        "nan": nan,
        "inf": inf,
        "huge": x[:, :64] * 1e30,
        "tiny": x[:, :64] * 1e-30,
        "zeros": torch.zeros(6, 64),
    }.items()


def _results(model, x, mode, dtype):
    with mode():
        x = x.detach().requires_grad_() if mode is torch.enable_grad else x
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            output = model(x)
        if mode is not torch.enable_grad:
            return [output]
        output.float().sum().backward()
        return [output, x.grad, *(p.grad for p in model.parameters())]


@functools.cache
def _wanted(make, name, mode, dtype):
    torch.manual_seed(0)
    return _results(make(), dict(_inputs())[name], MODES[mode], dtype)


@pytest.mark.parametrize("make", [Block, _odd], ids=["block", "odd sizes"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_results_are_of_the_kind_that_stock_layers_give(recipe, make):
    ours = make()
    convert_to_float8(ours, FP8Config(recipe=recipe))
    for (name, x), (mode, enter), dtype in itertools.product(_inputs(), MODES.items(), CASTS):
        where = name, mode, dtype
        wanted = _wanted(make, *where)
        results = _results(copy.deepcopy(ours), x, enter, dtype)
        for want, got in zip(wanted, results, strict=True):
            assert (want is None) == (got is None), where
            if want is None:
                continue
            assert (want.shape, want.dtype) == (got.shape, got.dtype), where
        bad = ~wanted[0].isfinite()
        assert torch.equal(bad & results[0].isfinite(), torch.zeros_like(bad)), where
        if all(want is None or want.isfinite().all() for want in wanted) and name != "huge":
            error = (wanted[0].float() - results[0].float()).norm()
            assert error <= 0.15 * wanted[0].float().norm() + 1e-20, where
