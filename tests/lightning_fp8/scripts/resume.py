"""resume.py FOLDER LEVEL: two ranks of DDP train exactly as if they had not been interrupted."""

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8Precision
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.tensor.split_weight import SplitWeight

folder, level = sys.argv[1:]
CONFIG = FP8Config(opt_level=level, recipe="delayed", amax_history_len=4)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))

    def training_step(self, batch, batch_idx):
        assert isinstance(self.net[0].weight, SplitWeight) == (level != "O1")
        return self.net(batch).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(max_epochs, ckpt_path=None, save_to=None):
    torch.manual_seed(1)
    batches = [torch.randn(8, 32) * 2.0 ** (-i / 2) for i in range(6)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        plugins=[FP8Precision(CONFIG)],
        strategy="ddp",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, DataLoader(torch.cat(batches), batch_size=4), ckpt_path=ckpt_path)
    assert isinstance(trainer.optimizers[0], Float8Optimizer) == (level != "O1")
    if save_to is not None:
        trainer.save_checkpoint(save_to)
        trainer.strategy.barrier()
    return list(model.parameters())


path = f"{folder}/half.ckpt"
uninterrupted = fit(2)
fit(1, save_to=path)
assert all(map(torch.equal, fit(2, ckpt_path=path), uninterrupted))
saved = torch.load(path, weights_only=True)
assert list(saved["state_dict"]) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
assert {type(tensor) for tensor in saved["state_dict"].values()} == {torch.Tensor}
