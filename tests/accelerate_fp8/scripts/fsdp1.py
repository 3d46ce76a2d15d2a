"""FSDP1 through Accelerate on the CPU, which it enables for GPUs only: the state is forced."""

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, set_seed
from torch import nn

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=1,
    auto_wrap_policy="size_based_wrap",
    min_num_params=500,
    use_orig_params=True,
    cpu_ram_efficient_loading=False,
)
accelerator = Accelerator(fsdp_plugin=plugin)
accelerator.state.fsdp_plugin = plugin
for shared in (PartialState(), accelerator.state):
    shared.distributed_type = DistributedType.FSDP
    shared.device = torch.device("cpu")
set_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    x = torch.randn(8, 32)
    loss = nn.functional.mse_loss(model(x), x)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
assert loss.isfinite()
moment = next(iter(optimizer.optimizer.state.values()))["exp_avg"]
print(f"{type(model).__name__} {moment.dtype}", flush=True)
