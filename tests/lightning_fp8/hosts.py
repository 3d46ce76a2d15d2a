"""Both copies of Lightning, and the model that most tests train in them."""

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from torch import nn

TRAINERS = [lightning.pytorch, pytorch_lightning]
FABRICS = [lightning.fabric, lightning_fabric]


def _each(hosts):
    return pytest.mark.parametrize("host", hosts, ids=lambda host: host.__name__)


each_trainer, each_fabric, each_host = _each(TRAINERS), _each(FABRICS), _each(TRAINERS + FABRICS)
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer of one process that says nothing of its own."""
one_trainer, one_fabric = _each(TRAINERS[:1]), _each(FABRICS[:1])
"""For what both copies leave to the same code of ours."""


def make_net():
    """Two weights of 8,192 elements, which are split, and small parameters, which are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 64))
