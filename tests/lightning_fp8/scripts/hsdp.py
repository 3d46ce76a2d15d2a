"""hsdp.py: replicas of shards over a mesh of the user's, 2 x 2 processes, under Lightning's
ModelParallelStrategy; losses of each level, and of BF16.
"""

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Precision
from tests.comm_counter import count_communication
from torch_fp8 import FP8Config

WIDTH = 64


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
        self.losses = []

    def configure_model(self):
        if isinstance(self.net[0].weight, DTensor):
            return
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(self.net[0], mesh=mesh, mp_policy=policy)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch).float(), torch.cumsum(batch, -1).tanh())
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        self.losses.append(total.item() / 4)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=6e-3)


losses = {}
for name in ("bf16", "O2", "O3"):
    options = {"precision": "bf16-mixed"}
    if name != "bf16":
        options = {"plugins": [FP8Precision(FP8Config(opt_level=name))]}
    model = Model()
    torch.manual_seed(1)
    data = torch.randn(64, 16, WIDTH)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1),
        max_steps=5,
        max_epochs=10,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with count_communication() as count:
        trainer.fit(model, DataLoader(data, batch_size=4))
    losses[name] = model.losses
    sums = count.of("all-reduce").of(dtype=torch.bfloat16).bytes_sent
    assert (sums > 0) == (name == "bf16"), (name, str(count))
    first, last = model.losses[0], sum(model.losses[-4:]) / 4
    assert last < 0.7 * first, model.losses
    reference = sum(losses["bf16"][-4:]) / 4
    assert abs(last / reference - 1) < 0.03, (name, last, reference)
if trainer.global_rank == 0:
    print("losses:", losses)
