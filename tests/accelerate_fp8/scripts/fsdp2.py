"""FSDP2 through Accelerate on the CPU, which it enables for GPUs only: the state is forced."""

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="size_based_wrap",
    min_num_params=500,
    cpu_ram_efficient_loading=False,
)
accelerator = Accelerator(fsdp_plugin=plugin)
accelerator.state.fsdp_plugin = plugin
for shared in (PartialState(), accelerator.state):
    shared.distributed_type = DistributedType.FSDP
set_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(dist.get_rank())


def train(num_steps):
    for _ in range(num_steps):
        x = torch.randn(8, 32)
        loss = nn.functional.mse_loss(model(x), x)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def histories():
    return [buffer.clone() for buffer in model.buffers()]


loss = train(3)
saved = histories()
accelerator.save_state("state")
train(1)
moved = not all(map(torch.equal, saved, histories()))
accelerator.load_state("state")
restored = all(map(torch.equal, saved, histories()))
print(f"rank {dist.get_rank()}: {len(saved)} buffers moved {moved} restored {restored}")
sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if accelerator.is_main_process:
    print("sharded", sharded, "classes", sorted({type(m).__name__ for m in model.modules()}))
    print("state", sorted(state), {type(tensor).__name__ for tensor in state.values()})
    print("loss finite", bool(loss.isfinite()))
