"""The peers: torchao as installed."""

import copy

import pytest
import torch
from torch import nn

from benchmarks import peers


def network():
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))
    layers.add_module("lm_head", nn.Linear(32, 48, bias=False))
    return layers.to(torch.bfloat16)


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
