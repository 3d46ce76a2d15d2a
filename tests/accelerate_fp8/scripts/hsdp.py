"""Replicas of shards by Accelerate's ParallelismConfig, 2 x 2 processes; usage: hsdp.py LEVEL..."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs

SHARDED = int(os.environ.get("WORLD_SIZE", "1")) > 1


class Training:
    def __init__(self, level):
        self.accelerator = Accelerator(
            mixed_precision="fp8",
            cpu=True,
            kwargs_handlers=[FP8Kwargs(FP8Config(opt_level=level))],
            gradient_accumulation_steps=2,
        )
        if SHARDED:  # what Accelerate does with these two on GPUs, and refuses on CPUs
            sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="size_based_wrap",
                min_num_params=500,
                cpu_ram_efficient_loading=False,
            )
            plugin.set_mixed_precision("fp8")
            state = self.accelerator.state
            state.fsdp_plugin, state.parallelism_config = plugin, sizes
            state.device_mesh = sizes.get_device_mesh("cpu")
            for shared in (PartialState(), state):
                shared.distributed_type = DistributedType.FSDP
            sizes._validate_accelerator(self.accelerator)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, *numbers):
        losses = []
        for number in numbers:
            for half in (0, 1):
                with self.accelerator.accumulate(self.model):
                    seed = torch.Generator().manual_seed(2 * number + half)
                    x = torch.randn(16, 64, generator=seed)
                    loss = nn.functional.mse_loss(self.model(x).float(), x)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


for level in sys.argv[1:]:
    training = Training(level)
    losses = training.steps(0, 1, 2)
    resumed = ""
    if SHARDED:
        with tempfile.TemporaryDirectory() as name:
            folders: list[str | None] = [name]
            dist.broadcast_object_list(folders)
            training.accelerator.save_state(folders[0])
            through = training.steps(3, 4)
            training = Training(level)
            training.accelerator.load_state(folders[0])
            resumed = f" resumed {training.steps(3, 4) == through}"
            dist.barrier()
    rank = dist.get_rank() if SHARDED else 0
    print(f"rank {rank}: {level} losses {losses}{resumed}", flush=True)
