import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.internals import STEPS, adopt_steps
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8


def _optimizer(cls=torch.optim.SGD):
    model = nn.Sequential(nn.Linear(64, 64))
    convert_to_float8(model, FP8Config())
    optimizer = cls(model.parameters(), lr=0.1)
    convert_optimizer(optimizer, FP8Config(), model=model)
    return optimizer


def _saved(folder, counts):
    keys = {
        f"{name}.param_groups.{group}.{STEPS}": torch.tensor([count])
        for name, count in counts.items()
        for group in range(2)
    }
    dcp.save({**keys, "other": torch.zeros(1)}, checkpoint_id=folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [False, True])
def test_each_optimizer_gets_its_own_count(tmp_path, nested):
    _saved(tmp_path / "part" if nested else tmp_path, {"critic": 3, "policy": 7})
    optimizers = [_optimizer(), _optimizer(torch.optim.AdamW), _optimizer()]
    before = copy.deepcopy(optimizers[1].state_dict())
    assert adopt_steps(tmp_path, optimizers) == 2
    assert [optimizers[0].fp8_steps, optimizers[2].fp8_steps] == [3, 7]
    assert optimizers[1].state_dict() == before


@pytest.mark.filterwarnings("ignore")
def test_a_folder_without_counts_changes_nothing(tmp_path):
    dcp.save({"weight": torch.zeros(2)}, checkpoint_id=tmp_path / "stock")
    optimizer = _optimizer()
    for path in (tmp_path, tmp_path / "stock", tmp_path / "missing"):
        assert adopt_steps(path, [optimizer]) == 0
    assert optimizer.fp8_steps == 0
