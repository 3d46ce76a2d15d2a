"""``ray_classes.py {ddp,model-parallel,fsdp}``: Lightning with classes of the bases of Ray's.

As ray.train.lightning 2.60 has them, in a worker whose process group Ray has made already. Prints
the losses.
"""

import os
import sys

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import torch_fp8

kind = sys.argv[1]
# As ray.train.torch does in each worker, before Lightning starts.
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)


class RayLightningEnvironment(LightningEnvironment):
    """Ranks come from Ray, and processes too."""

    def world_size(self):
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self):
        return int(os.environ["RANK"])

    def local_rank(self):
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self):
        return 0

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass

    @property
    def creates_processes_externally(self):
        return True


class OnRaysDevice:
    """The device that Ray gave the worker."""

    @property
    def root_device(self):
        return torch.device("cpu")


class RayDDPStrategy(OnRaysDevice, DDPStrategy):
    pass


class RayFSDPStrategy(OnRaysDevice, FSDPStrategy):
    pass


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.losses = []

    def configure_model(self):
        if kind == "model-parallel":
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch), batch)
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.losses.append(float(mean))
        self.in_fp8 = isinstance(self.net[0], torch_fp8.Float8Linear)  # until the fit has ended
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(1)
data = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8)
strategies = {
    "ddp": RayDDPStrategy,
    "fsdp": RayFSDPStrategy,
    "model-parallel": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}
try:
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategies[kind](),
        devices=2,
        plugins=[RayLightningEnvironment()],
        precision="fp8-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Regression()
    trainer.fit(module, data)
except (ValueError, TypeError) as error:
    os.write(1, f"refused: {error}\n".encode())
    os._exit(0)
text = " ".join(value.hex() for value in module.losses)
os.write(1, f"rank {trainer.global_rank} losses {module.in_fp8} {text}\n".encode())
os._exit(0)
