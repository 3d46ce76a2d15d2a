"""moe_fsdp.py FOLDER [PRECISION]: FSDP2 of a mixture of experts on two processes.

It trains two steps, saves, loads into another model, and trains on: both go the same way.
"""

import sys

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

folder, *precision = sys.argv[1:]
CONFIG = Qwen3MoeConfig(
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=48,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
)


class Language(L.LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.model = Qwen3MoeForCausalLM(CONFIG)
        self.losses = []

    def configure_model(self):
        if not isinstance(self.model, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(2 * self.global_step + self.global_rank)
        ids = torch.randint(1, 64, (2, 16), generator=generator)
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(max_steps):
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        precision=precision[0] if precision else None,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def loader():
    return DataLoader(torch.zeros(8, 1), batch_size=2)  # a step makes its own tokens


first, fitted = Language(0), trainer(2)
fitted.fit(first, loader())
fitted.save_checkpoint(f"{folder}/moe.ckpt")
gone_on = trainer(4)
other = Language(1)
gone_on.fit(other, loader(), ckpt_path=f"{folder}/moe.ckpt")
straight = Language(0)
trainer(4).fit(straight, loader())
want, got = straight.losses, first.losses + other.losses
assert len(want) == len(got) == 4, (want, got)
assert all(abs(a - b) < 1e-3 * abs(a) for a, b in zip(want, got, strict=True)), (want, got)
print(f"rank {fitted.global_rank}: trained, saved and loaded", flush=True)
