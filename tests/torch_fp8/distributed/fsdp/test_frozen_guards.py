import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fp8 import FP8Config, convert_to_float8, freeze, thaw
from torch_fp8.distributed import connect_fsdp

SHARDED = r"'0\.weight' is stored in FP8 only and sharded by FSDP2.*thaw the model before fully_sh"


@pytest.fixture
def sharded(single_process_group):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    model.requires_grad_(False)
    config = FP8Config(recipe="tensorwise", frozen_weights="fp8")
    convert_to_float8(model, config)
    fully_shard(model)
    assert connect_fsdp(model, config).num_frozen == 2
    return model


REFUSED = {
    "thawed": thaw,
    "trained": lambda model: model[0].weight._local_tensor.requires_grad_(True),
    "merged": lambda model: model[0].begin_merge(),
    "moved": lambda model: model[0].to("meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_shard_is_not(sharded, name):
    kept = sharded[0].weight._local_tensor.qdata.clone()
    with pytest.raises(RuntimeError, match=SHARDED):
        REFUSED[name](sharded)
    held = sharded[0].weight._local_tensor.qdata
    assert torch.equal(held.view(torch.uint8), kept.view(torch.uint8))


def test_training_a_shard_is_refused_when_it_is_gathered(sharded):
    sharded[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'0\.weight' .* its gradient was requested .*keep"):
        sharded(torch.randn(4, 128))


def test_a_weight_of_tensor_parallelism_stays(single_process_group):
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
    convert_to_float8(model, "tensorwise")
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    report = freeze(model)
    assert report.frozen == ("1",)
    assert report.kept == (("0", "its weight is sharded by tensor parallelism"),)
