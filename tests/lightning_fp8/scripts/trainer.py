"""trainer.py HOST STRATEGY DEVICES [PRECISION]: two steps of `HOST`'s Trainer, and a validation."""

import importlib
import sys

host, strategy, devices, *flag = sys.argv[1:]
precision = {"precision": flag[0]} if flag else {}
L = importlib.import_module(host)

import torch  # noqa: E402  (the host comes first, as in most scripts)
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).float().pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    data = DataLoader(torch.randn(16, 32), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=int(devices),
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **precision,
    )
    trainer.fit(Regression(), data, data)


if __name__ == "__main__":
    main()
