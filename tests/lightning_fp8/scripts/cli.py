"""LightningCLI of the package named by the environment variable HOST."""

import importlib
import os

host = os.environ["HOST"]
L = importlib.import_module(host)
LightningCLI = importlib.import_module(f"{host}.cli").LightningCLI

import torch  # noqa: E402  (the host comes first, as in most scripts)
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


class Regression(L.LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 16))

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(torch.randn(16, 32), batch_size=4)


if __name__ == "__main__":
    LightningCLI(Regression, save_config_callback=None)
