"""``ray_cluster.py FOLDER [HOST ...]``: a Ray cluster of this machine, whose TorchTrainer runs each
host with two workers. Each worker writes its losses to a file of its own in FOLDER.
"""

import sys
import tempfile
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}


def build():
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

    torch.manual_seed(1)
    return Net(), [{"x": row} for row in torch.randn(64, 64)]


def in_fp8(layer):
    import torch_fp8

    return isinstance(layer, torch_fp8.Float8Linear)


def report(config, converted, losses):
    """Write whether the layers were in FP8, and the losses."""
    rank = ray.train.get_context().get_world_rank()
    text = " ".join(map(str, [converted, *losses]))
    Path(config["folder"], f"{config['kind']}-{rank}").write_text(text)


def with_accelerate(config):
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model, rows = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    report(config, in_fp8(model.module.net[0]), losses)


def with_trainer(config):
    from ray.train.huggingface.transformers import prepare_trainer
    from transformers import Trainer, TrainingArguments

    model, rows = build()
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, num_train_epochs=1, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = prepare_trainer(Trainer(model, arguments, train_dataset=rows))
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    report(config, in_fp8(model.net[0]), losses)


def with_lightning(config):
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from ray.train import lightning
    from torch.distributed.fsdp import fully_shard

    kind = config["kind"]

    class Regression(LightningModule):
        def __init__(self, model):
            super().__init__()
            self.net, self.losses = model.net, []

        def configure_model(self):
            if kind == "model-parallel":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.mse_loss(self.net(batch["x"]), batch["x"])
            mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
            self.losses.append(float(mean))
            self.converted = in_fp8(self.net[0])  # until the fit has ended
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategies = {
        "ddp": lightning.RayDDPStrategy,
        "fsdp": lightning.RayFSDPStrategy,
        "model-parallel": lambda: ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1
        ),
    }
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    model, rows = build()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategies[kind](),
        # "auto" is one device on a CPU, and ModelParallelStrategy takes that of the local rank.
        devices=ray.train.get_context().get_local_world_size(),
        plugins=[lightning.RayLightningEnvironment()],
        precision="fp8-mixed",
        max_epochs=1,
        **options,
    )
    if kind == "ddp":
        trainer = lightning.prepare_trainer(trainer)
    module = Regression(model)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
    report(config, module.converted, module.losses)


HOSTS = {
    "accelerate": with_accelerate,
    "trainer": with_trainer,
    "ddp": with_lightning,
    "model-parallel": with_lightning,
    "fsdp": with_lightning,
}


def main():
    folder, hosts = Path(sys.argv[1]), sys.argv[2:] or HOSTS
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as logs:  # sockets: short paths
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            object_store_memory=80_000_000,
            _temp_dir=logs,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}},
        )
        for kind in hosts:
            environment = {"env_vars": FP8 if kind == "trainer" else {}}
            trainer = TorchTrainer(
                HOSTS[kind],
                train_loop_config={"kind": kind, "folder": str(folder)},
                scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(storage_path=str(folder), worker_runtime_env=environment),
            )
            try:
                trainer.fit()
            except Exception as error:
                print(f"{kind} refused: {error}", flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
