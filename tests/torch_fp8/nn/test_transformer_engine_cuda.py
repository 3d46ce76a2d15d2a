"""The backend on a card with the real Transformer Engine."""

import copy

import pytest
import torch
from torch import nn

import torch_fp8
from tests.steps import train_steps
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.nn.transformer_engine import TransformerEngineLinear, check_transformer_engine
from torch_fp8.quantization.metrics import sqnr_db

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(params=["tensorwise", "delayed", "blockwise", "mxfp8"])
def config(request):
    """Of each recipe that Transformer Engine runs on this card."""
    pytest.importorskip("transformer_engine.pytorch")
    try:
        check_transformer_engine(CUDA, request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return FP8Config(backend="transformer-engine", recipe=request.param)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)
        self.same = nn.Linear(512, 256, bias=False)
        self.same.weight = self.down.weight

    def forward(self, x):
        y = self.up(x).relu()
        return self.down(y) + self.same(y)


def _losses(model, config=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if config is not None:
        convert_to_float8(model, config)
        torch_fp8.convert_optimizer(optimizer, config, model=model)

    def loss_of(model, step):
        x = torch.randn(3, 77, 256, generator=torch.Generator().manual_seed(step)).to(CUDA)
        with torch.autocast("cuda", torch.bfloat16):
            return (model(x) - x).float().pow(2).mean()

    return train_steps(model, optimizer, 20, loss_of=loss_of)


def test_trains_as_bf16_does(config):
    """The band is that of the stub's levels: 5 %."""
    torch.manual_seed(0)
    model = Model().to(CUDA)
    stock, keys = copy.deepcopy(model), list(model.state_dict())
    parameters = list(model.parameters())
    losses = _losses(model, config)
    assert losses == pytest.approx(_losses(stock), rel=0.05)
    assert losses[-1] < losses[0]
    assert isinstance(model.up, TransformerEngineLinear)
    assert list(model.state_dict()) == keys
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("num_tokens", [0, 1, 77, 256])
def test_gradients_agree_with_float32(config, num_tokens):
    """24 dB is the floor of a product of E5M2 with E4M3."""
    linear = nn.Linear(256, 512, device=CUDA)
    exact = copy.deepcopy(linear)
    convert_to_float8(linear, config)
    x, grad = torch.randn(num_tokens, 256, device=CUDA), torch.randn(num_tokens, 512, device=CUDA)
    for _ in range(3):  # delayed scaling has to see amaxes first
        for net in (linear, exact):
            net.zero_grad()
            net.x = x.clone().requires_grad_()
            net.y = net(net.x)
            net.y.backward(grad)
    assert linear.y.shape == exact.y.shape
    if num_tokens:
        assert sqnr_db(exact.y, linear.y) >= 28 - 1
        assert sqnr_db(exact.x.grad, linear.x.grad) >= 24 - 1
        assert sqnr_db(exact.weight.grad, linear.weight.grad) >= 24 - 1


def test_a_frozen_weight_gets_no_gradient(config):
    model = Model().to(CUDA)
    model.up.weight.requires_grad_(False)
    convert_to_float8(model, config)
    model(torch.randn(32, 256, device=CUDA)).sum().backward()
    assert model.up.weight.grad is None
    assert model.down.weight.grad is not None


def test_scaling_state_is_taken_over(config):
    model = Model().to(CUDA)
    convert_to_float8(model, config)
    for _ in range(3):
        model(torch.randn(32, 256, device=CUDA)).sum().backward()
    state = torch_fp8.scaling_state_dict(model)
    copied = copy.deepcopy(model)
    copied(torch.zeros(16, 256, device=CUDA))
    assert torch_fp8.scaling_state_dict(copied).keys() == state.keys()
    if config.recipe == "delayed":
        assert (state["up.amax_history"][:, :3] > 0).all()
        assert (state["up.amax_history"][:, 3:] == 0).all()
        moved = torch_fp8.scaling_state_dict(copied)["up.amax_history"]
        assert torch.equal(moved[1, 1:4], state["up.amax_history"][1, :3])


def test_compiles(config):
    if config.recipe == "delayed":
        pytest.skip("Transformer Engine compiles no delayed scaling")
    model = Model().to(CUDA, torch.bfloat16)
    convert_to_float8(model, config)
    x = torch.randn(128, 256, device=CUDA, dtype=torch.bfloat16)
    expected = model(x)
    assert sqnr_db(expected.float(), torch.compile(model)(x).float()) >= 40
