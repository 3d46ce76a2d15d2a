"""A Lightning loop that prints the loss of each step exactly, on every rank.

``slurm.py NODES DEVICES``: as under srun, whose variables the test sets.
"""

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

nodes, devices = map(int, sys.argv[1:])


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch), batch)
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.losses.append(mean.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(1)
data = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8)
trainer = Trainer(
    accelerator="cpu",
    strategy="ddp",
    num_nodes=nodes,
    devices=devices,
    precision="fp8-mixed",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
module = Regression()
trainer.fit(module, data)
environment = type(trainer.strategy.cluster_environment).__name__
text = " ".join(value.hex() for value in module.losses)
os.write(1, f"rank {trainer.global_rank} losses {environment} {text}\n".encode())
