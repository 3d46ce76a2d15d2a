"""Loops that Ray's TorchTrainer runs in a worker: each host's, on the same model and rows.

Each returns its first layer's class as it was in training, and the losses.
"""

import tempfile

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x, labels=None):
        y = self.net(x)
        return {"loss": nn.functional.mse_loss(y.float(), x), "y": y}


def rows():
    torch.manual_seed(1)
    return [{"x": row} for row in torch.randn(64, 64)]


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return type(model.module.net[0]), losses


def with_trainer(prepare_trainer):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, num_train_epochs=1, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
        lr_scheduler_type="constant", data_seed=0,
    )  # fmt: skip
    model = Net()
    trainer = prepare_trainer(Trainer(model, arguments, train_dataset=rows()))
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return type(model.net[0]), losses


def with_lightning(kind, ray, devices=2):
    """`ray` has Ray's strategies and environment, and perhaps ``prepare_trainer``."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Regression(LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = Net().net, []

        def configure_model(self):
            if kind == "model-parallel":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self.net(batch["x"]), batch["x"])
            mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
            self.losses.append(float(mean))
            self.layer = type(self.net[0])  # until the fit has ended
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategies = {
        "ddp": ray.RayDDPStrategy,
        "fsdp": ray.RayFSDPStrategy,
        "model-parallel": lambda: ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1
        ),
    }
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategies[kind](),
        devices=devices,
        plugins=[ray.RayLightningEnvironment()],
        precision="fp8-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    if kind == "ddp" and hasattr(ray, "prepare_trainer"):
        trainer = ray.prepare_trainer(trainer)
    module = Regression()
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=8))
    return module.layer, module.losses
