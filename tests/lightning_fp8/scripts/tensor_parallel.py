"""tensor_parallel.py: FSDP2 and tensor parallelism on four processes, a mesh of 2 x 2.

Once in bf16-mixed and once in fp8-mixed.
"""

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.data import DataLoader

from tests.comm_counter import count_communication
from torch_fp8.distributed.tensor_parallel.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
)

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.losses = []

    def configure_model(self):
        if isinstance(self.blocks[0].up.weight, DTensor):
            return
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        for block in self.blocks:
            parallelize_module(
                block,
                tensor,
                {
                    "norm": SequenceParallel(use_local_output=True),
                    "up": Float8ColwiseParallel(input_layouts=Shard(1)),
                    "down": Float8RowwiseParallel(output_layouts=Shard(1)),
                },
            )
            fully_shard(block, mesh=data)
        fully_shard(self.blocks, mesh=data)

    def training_step(self, batch, batch_idx):
        rank = self.device_mesh["tensor_parallel"].get_local_rank()
        x = batch.chunk(2, dim=1)[rank]
        target = torch.cumsum(batch, -1).tanh().chunk(2, dim=1)[rank]
        loss = nn.functional.mse_loss(self.blocks(x).float(), target)
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        self.losses.append(total.item() / 4)
        return loss / 2

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


losses = {}
for precision in ("bf16-mixed", "fp8-mixed"):
    model = Model()
    torch.manual_seed(1)
    data = torch.randn(4, 16, WIDTH).repeat(15, 1, 1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        precision=precision,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
        max_steps=15,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with count_communication() as count:
        trainer.fit(model, DataLoader(data, batch_size=2))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert {type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    # Of the last five steps: a single one of so few rows goes up and down by a percent.
    losses[precision] = sum(model.losses[-5:]) / 5
    assert losses[precision] < 0.5 * model.losses[0]
    gathers = count.of("all-gather")
    share = gathers.of(dtype=torch.uint8).bytes_sent / gathers.bytes_sent
    assert share > 0.99 if precision == "fp8-mixed" else share < 0.01, share
# Two blocks in FP8, of which the second hears of the noise of the first.
assert abs(losses["fp8-mixed"] / losses["bf16-mixed"] - 1) < 0.01, losses
if trainer.global_rank == 0:
    print("losses:", losses)
