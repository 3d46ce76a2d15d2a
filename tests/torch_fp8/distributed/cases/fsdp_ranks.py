"""What several modules of cases of FSDP2 need; run by run_cases.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.internals import UnshardedFloat8Weight
from tests.torch_fp8.distributed.ranks import RANK, RANKS
from torch_fp8 import convert_to_float8
from torch_fp8.distributed import connect_fsdp, split_sharded

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.left(x)


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model_of(seed=0, hidden=96):
    """Two blocks, of which one has uneven shards, between a first and a last layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 64), Block(64, hidden), Block(64, 72), nn.Linear(64, 8, bias=False)
    )


def sharded(config, policy=None, model=None, mesh=None, connected=True, **options):
    model = model_of() if model is None else model
    mesh = init_device_mesh("cpu", (RANKS,)) if mesh is None else mesh
    options = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy(), **options}
    convert_to_float8(model, config)
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, **options)
    fully_shard(model, **options)
    return model, connect_fsdp(model, config) if connected else None


def trained(config, policy=None, model=None, **options):
    model, _ = sharded(config, policy, model, connected=False, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    split_sharded(model, [optimizer], config)
    connect_fsdp(model, config)
    return model, optimizer


def batch(step, ranks=(RANK,)):
    seeds = [torch.Generator().manual_seed(9 * step + rank) for rank in ranks]
    return torch.cat([torch.randn(8, 32, generator=seed) for seed in seeds])


def train(model, optimizer, steps, ranks=(RANK,)):
    for step in steps:
        loss = loss_of(model, batch(step, ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def unshard(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return model


def reshard(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def attached(model):
    shards = [p._local_tensor for p in model.parameters()]
    return sum(hasattr(shard, "fsdp_pre_all_gather") for shard in shards)


def loss_of(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def weights_of(model):
    named = (
        (n, m._parameters["weight"]) for n, m in model.named_modules() if "weight" in m._parameters
    )
    return {n: w for n, w in named if isinstance(w, UnshardedFloat8Weight)}


def averaged(value):
    value = torch.tensor(float(value))
    dist.all_reduce(value)
    return value.item() / RANKS
