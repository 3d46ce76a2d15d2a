import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.leaving_peak import check_peak_of_leaving
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_to_float8, freeze, restore_weights, revert
from torch_fp8.distributed import join_sharded, split_sharded

WIDTH = 128
BIGGEST = 4 * WIDTH * 4 * WIDTH
"""The bytes of the biggest weight in float32, which is a fifth of the model."""


def _model():
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4 * WIDTH))


def _trained(level):
    model, config = _model(), FP8Config(opt_level=level)
    optimizer, _ = adamw(model, config)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("way", ["revert", "restore_weights", "to"])
def test_a_model_in_two_halves(way, level):
    model, optimizer = _trained(level)
    ways = {
        "revert": lambda: revert(model),
        "restore_weights": lambda: restore_weights(optimizer),
        "to": lambda: model.to(torch.float64),
    }
    check_peak_of_leaving(model, ways[way], (1 + (way == "to")) * BIGGEST)


def test_a_model_in_fp8_alone():
    model = _model()
    freeze(model)
    # The reference decodes a weight in float32, with its scales as wide as itself.
    check_peak_of_leaving(model, lambda: revert(model), 3 * BIGGEST)


def test_a_sharded_model(single_process_group):
    model, config = _model(), FP8Config()
    convert_to_float8(model, config)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    split_sharded(model, [optimizer], config)
    check_peak_of_leaving(model, lambda: join_sharded(model, [optimizer]), BIGGEST)
