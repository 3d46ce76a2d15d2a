"""torchao's own gates for FP8 linear layers, with ours in their place.

Its tests of ``Float8Linear`` train one layer for one step and ask for a signal-to-noise ratio
against the layer in high precision: 18 dB of the output, 17 of the gradients (rowwise and
tensorwise alike), and 20 of a Llama feed-forward network's output and every gradient. Re-expressed,
not copied: inputs of 2, 3 and 4 dimensions, BF16 and float32, with a bias and without one.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.quantization.metrics import sqnr_db

OUTPUT_DB, GRADIENT_DB, FEED_FORWARD_DB = 18.0, 17.0, 20.0
SHAPES = [(16, 16), (2, 16, 16), (3, 2, 16, 16)]


def _gaussian(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _one_step(model, x, seed=2):
    """The output, and gradients by name, of one step with a gradient of ones and noise."""
    x = x.clone().requires_grad_()
    output = model(x)
    output.backward(_gaussian(*output.shape, seed=seed, dtype=output.dtype))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return output, {**gradients, "the input": x.grad}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=["2-D", "3-D", "4-D"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_linear_layer_is_within_torchaos_gates(recipe, shape, dtype, bias):
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(16, 32, bias=bias, dtype=dtype))
    ours = copy.deepcopy(stock)
    convert_to_float8(ours, FP8Config(recipe=recipe))
    x = _gaussian(*shape, dtype=dtype)
    (want, want_grads), (got, grads) = _one_step(stock, x), _one_step(ours, x)
    assert got.dtype == want.dtype
    assert sqnr_db(want, got) >= OUTPUT_DB
    for name, gradient in want_grads.items():
        assert sqnr_db(gradient, grads[name]) >= GRADIENT_DB, name


class FeedForward(nn.Module):
    """Llama's."""

    def __init__(self, dim=1024, hidden=2816):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(*sizes, bias=False) for sizes in ((dim, hidden), (hidden, dim), (dim, hidden))
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_feed_forward_network_is_within_torchaos_gates(recipe):
    torch.manual_seed(0)
    stock = FeedForward().bfloat16()
    ours = copy.deepcopy(stock)
    convert_to_float8(ours, FP8Config(recipe=recipe))
    x = _gaussian(1, 256, 1024, dtype=torch.bfloat16)
    (want, want_grads), (got, grads) = _one_step(stock, x), _one_step(ours, x)
    assert sqnr_db(want, got) > FEED_FORWARD_DB
    for name, gradient in want_grads.items():
        assert sqnr_db(gradient, grads[name]) > FEED_FORWARD_DB, name


def test_the_gates_can_tell_a_wrong_scale():
    """A layer whose weight is read with half its scale falls below them."""
    x, w = _gaussian(16, 16), _gaussian(32, 16, seed=3)
    assert sqnr_db(x @ w.t(), x @ (0.8 * w).t()) < OUTPUT_DB
