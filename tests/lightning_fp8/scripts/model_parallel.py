"""model_parallel.py trainer|fabric [PRECISION]: two FSDP2 steps on two processes."""

import sys

import lightning as L
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

kind, *precision = sys.argv[1:]
common = {"accelerator": "cpu", "devices": 2, "precision": precision[0] if precision else None}


def make_net():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 16))


def shard(net, mesh):
    if not isinstance(net, FSDPModule):
        fully_shard(net[0], mesh=mesh["data_parallel"])  # a linear layer that is a unit itself
        fully_shard(net, mesh=mesh["data_parallel"])
    return net


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def configure_model(self):
        shard(self.net, self.device_mesh)

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if kind == "trainer":
    trainer = L.Trainer(
        **common,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, DataLoader(torch.randn(16, 32), batch_size=4))
    assert {type(m).__name__ for m in model.net} <= {"FSDPLinear", "ReLU", "Linear"}
else:
    strategy = FabricModelParallel(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = L.Fabric(**common, strategy=strategy)
    fabric.launch()
    model = fabric.setup(make_net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        loss = model(torch.randn(4, 32)).pow(2).mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
