"""resume.py ddp|model_parallel FOLDER LEVEL: on two processes, training that is saved and resumed
equals the uninterrupted run, exactly. Sharded weights stay float32; their states have 8 bits."""

import sys

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8Precision
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.tensor.split_weight import SplitWeight

name, folder, level = sys.argv[1:]
CONFIG = FP8Config(opt_level=level, recipe="delayed", amax_history_len=4)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))

    def configure_model(self):
        if name == "model_parallel" and not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        sharded = name == "model_parallel" or level == "O1"
        assert isinstance(self.net[0].weight, SplitWeight) != sharded
        return self.net(batch).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(max_epochs, sharded, ckpt_path=None, save_to=None):
    torch.manual_seed(1)
    batches = [torch.randn(8, 32) * 2.0 ** (-i / 2) for i in range(6)]
    strategy = "ddp"
    if name == "model_parallel":
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=sharded
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        plugins=[FP8Precision(CONFIG)],
        strategy=strategy,
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
    return [getattr(p, "full_tensor", p.clone)() for p in model.parameters()]


uninterrupted = fit(2, sharded=True)
for sharded in (True, False) if name == "model_parallel" else (False,):
    path = f"{folder}/sharded-{sharded}.ckpt"
    fit(1, sharded, save_to=path)
    resumed = fit(2, sharded, ckpt_path=path)
    assert all(torch.equal(a, b) for a, b in zip(resumed, uninterrupted, strict=True)), sharded
saved = torch.load(path, weights_only=True)
assert list(saved["state_dict"]) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
assert {type(tensor) for tensor in saved["state_dict"].values()} == {torch.Tensor}
