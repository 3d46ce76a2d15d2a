"""The peers: torchao as installed, Transformer Engine as a stub with its signatures."""

import copy

import pytest
import torch
from torch import nn

from benchmarks import peers
from torch_fp8.quantization.metrics import sqnr_db


def network():
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))
    layers.add_module("lm_head", nn.Linear(32, 48, bias=False))
    return layers.to(torch.bfloat16)


@pytest.mark.parametrize("recipe", peers.TRANSFORMER_ENGINE_RECIPES)
def test_transformer_engine_takes_the_linears_and_their_weights(te, recipe):
    stock = network()
    ours = peers.TransformerEngine(copy.deepcopy(stock), recipe)
    kinds = [type(m).__module__.partition(".")[0] for m in ours.module.children()]
    assert kinds == ["transformer_engine", "torch", "transformer_engine", "torch"]
    assert torch.equal(ours.module[0].weight, stock[0].weight)
    assert torch.equal(ours.module[0].bias, stock[0].bias)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    assert sqnr_db(stock(x).float(), ours(x).float()) > 15


@pytest.mark.parametrize("recipe", peers.TORCHAO_RECIPES)
def test_torchao_converts_all_but_the_head(recipe):
    pytest.importorskip("torchao")
    stock = network()
    ours = peers.torchao(copy.deepcopy(stock), recipe)
    kinds = [type(m).__name__ for m in ours.children()]
    assert kinds == ["Float8Linear", "GELU", "Float8Linear", "Linear"]
    assert type(peers.torchao(nn.Linear(32, 32), recipe)).__name__ == "Float8Linear"


@pytest.mark.parametrize("name", peers.TORCHAO_OPTIMIZERS)
def test_torchao_s_optimizers_are_its_own(name):
    pytest.importorskip("torchao")
    optimizer = peers.torchao_optimizer(name, network().parameters(), lr=1e-3)
    assert type(optimizer).__name__ == name
    assert optimizer.bf16_stochastic_round
