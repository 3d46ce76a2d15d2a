import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.torch_fp8.distributed.ranks import RANK, RANKS, on_ranks
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import connect_fsdp

pytestmark = pytest.mark.long
CONFIG = FP8Config(recipe="tensorwise")
SHARDED_ALIKE = "torch.float32, sharded by '{0}' along dimension 0, in FP8 (tensorwise) on rank"
SAID = {
    "width": f"'0.weight' is (64, 64) {SHARDED_ALIKE.format(0)} 0, (96, 64) "
    f"{SHARDED_ALIKE.format(0)} 1",
    "depth": "'2.weight' is missing on rank 0, (64, 64) torch.float32",
    "skip": f"'1.weight' is (64, 64) {SHARDED_ALIKE.format(1)} 0, (64, 64) torch.float32, sharded "
    "by '1' along dimension 0, in high precision on rank 1",
    "sharding": "sharded by 'the root' along dimension 0, in FP8 (tensorwise) on rank 1",
}


def shard(difference=None):
    """Shard a model that differs on rank 1."""
    differs = RANK == 1 and difference
    width = 96 if differs == "width" else 64
    layers = [nn.Linear(64, width), nn.Linear(width, 64)]
    layers += [nn.Linear(64, 64)] if differs == "depth" else []
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    skip = ("1",) if differs == "skip" else ("lm_head",)
    convert_to_float8(model, FP8Config(recipe="tensorwise", skip=skip))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in layers if differs != "sharding" else []:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@on_ranks(2)
def test_every_rank_is_told_what_differs():
    for difference, text in SAID.items():
        model = shard(difference)
        with pytest.raises(ValueError, match="the model differs between ranks") as error:
            connect_fsdp(model, CONFIG)
        assert text in str(error.value)
        assert "Build, convert and shard the same model on all ranks" in str(error.value)


@on_ranks(2)
def test_ranks_that_agree_train_and_generate_between_steps():
    model = shard()
    connect_fsdp(model, CONFIG)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.inference_mode():
            model(torch.ones(2, 64))
    assert losses == losses[:1] * 3
