"""FSDP2 at every level: training, what it saves, and how it resumes.

Usage: fsdp2_levels.py MODE...; the modes are below. One process runs them unsharded.
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from accelerate_fp8 import FP8Config, FP8Kwargs
from torch_fp8.optim.residual import join_weight

# Mode: options of FP8Config, of the plugin, of the test.
MODES = {
    "O1": ({"opt_level": "O1", "recipe": "delayed"}, {}),
    "O2": ({}, {}),
    "full": ({}, {"state_dict_type": "FULL_STATE_DICT"}),
    "sparing": ({}, {"cpu_ram_efficient_loading": True}),
    "O3": ({"opt_level": "O3"}, {}),
    "release": ({"gradient_release": True}, {}),
    "sgd": ({}, {}),
    "frozen": ({}, {}),
    "own_dtype": ({}, {"mixed_precision_policy": "none"}),
    # Replicas of shards by Accelerate's ParallelismConfig, 2 x 2 processes, with accumulation.
    "hsdp_O2": ({}, {}),
    "hsdp_O3": ({"opt_level": "O3"}, {}),
}
SHARDED = int(os.environ.get("WORLD_SIZE", "1")) > 1
warnings.filterwarnings("ignore", "Detected an existing checkpoint")


def new_model():
    return nn.Sequential(
        nn.Linear(64, 97), nn.LayerNorm(97), nn.Linear(97, 112), nn.ReLU(), nn.Linear(112, 64)
    )


class Training:
    def __init__(self, mode):
        options, chosen = MODES[mode]
        self.halves = 2 if mode.startswith("hsdp") else 1
        handlers = [FP8Kwargs(FP8Config(**options))]
        plugin = None
        if SHARDED:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="size_based_wrap",
                min_num_params=500,
                **{"cpu_ram_efficient_loading": False, **chosen, "mixed_precision_policy": None},
            )
        self.accelerator = Accelerator(
            mixed_precision="fp8",
            cpu=True,
            fsdp_plugin=plugin,
            kwargs_handlers=handlers,
            gradient_accumulation_steps=self.halves,
        )
        if plugin is not None:  # what Accelerate does on GPUs only
            state = self.accelerator.state
            state.fsdp_plugin = plugin
            if "mixed_precision_policy" not in chosen:
                plugin.set_mixed_precision("fp8")
            for shared in (PartialState(), state):
                shared.distributed_type = DistributedType.FSDP
            if self.halves == 2:
                sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
                state.parallelism_config = sizes
                state.device_mesh = sizes.get_device_mesh("cpu")
                sizes._validate_accelerator(self.accelerator)
        # Weights that are loaded sparingly are rank 0's, whatever the other ranks have.
        torch.manual_seed(dist.get_rank() if mode == "sparing" and SHARDED else 0)
        model = new_model()
        if mode == "frozen":
            model[0].requires_grad_(False)
        kind = torch.optim.SGD if mode == "sgd" else torch.optim.AdamW
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = kind(trained, lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.clip = mode != "release"

    def steps(self, *numbers):
        losses = []
        for number in (self.halves * n + half for n in numbers for half in range(self.halves)):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x).float(), x)
                self.accelerator.backward(loss)
                if self.clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def error(self):
        """The largest difference of this rank's weights, with residuals, from rank 0's at first."""
        torch.manual_seed(0)
        errors = []
        for whole, parameter in zip(new_model().parameters(), self.model.parameters(), strict=True):
            shard = join_weight(parameter)
            parts = whole.detach().chunk(dist.get_world_size())
            part = parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole[:0]
            errors.append(((shard - part).abs() / part.abs().clamp(min=1e-6)).max().item())
        return max(errors)

    def bits(self):
        parameters = list(self.model.parameters())
        states = [self.optimizer.state.get(p, {}) for p in parameters]
        tensors = [*parameters, *(s[k] for s in states for k in sorted(s)), *self.model.buffers()]
        return [t.to_local().clone() if isinstance(t, DTensor) else t.clone() for t in tensors]


def run(mode, folder):
    training = Training(mode)
    error = training.error() if SHARDED and training.halves == 1 else 0.0
    losses = training.steps(*range(3))
    dtypes = "+".join(sorted({str(p.dtype)[6:] for p in training.model.parameters()}))
    said = f"{mode} losses {losses[0]:.7f} {losses[-1]:.7f} error {error:.3g} dtypes {dtypes}"
    if not SHARDED:
        return said
    training.accelerator.save_state(folder)
    expected, bits = training.steps(3, 4), training.bits()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(training.model, training.optimizer, options=options)
    entries = state.get("state", {}).values()  # on the first rank only
    kinds = sorted({key for entry in entries for key in entry})
    resumed = Training(mode)
    resumed.accelerator.load_state(folder)
    same = resumed.steps(3, 4) == expected and all(map(torch.equal, bits, resumed.bits()))
    return f"{said} saved {'+'.join(kinds)} resumed {same}"


for mode in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if SHARDED:
            PartialState(cpu=True)
            dist.broadcast_object_list(folder)
        line = run(mode, Path(folder[0]) / "state")
        rank = dist.get_rank() if SHARDED else 0
        print(f"rank {rank}: {line}\n", end="", flush=True)
        if SHARDED:
            dist.barrier()
