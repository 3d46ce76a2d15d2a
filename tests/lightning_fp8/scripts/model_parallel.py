"""model_parallel.py [PRECISION]: two FSDP2 steps of Fabric on two processes."""

import sys

import lightning as L
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def make_net():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 16))


def shard(net, mesh):
    if not isinstance(net, FSDPModule):
        fully_shard(net[0], mesh=mesh["data_parallel"])  # a linear layer that is a unit itself
        fully_shard(net, mesh=mesh["data_parallel"])
    return net


strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
fabric = L.Fabric(
    accelerator="cpu",
    devices=2,
    precision=sys.argv[1] if len(sys.argv) > 1 else None,
    strategy=strategy,
)
fabric.launch()
model = fabric.setup(make_net())
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
for _ in range(2):
    loss = model(torch.randn(4, 32)).pow(2).mean()
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
