"""LoRA on frozen experts under FSDP2 as a configuration file of ``accelerate launch`` asks for it.

Usage: fsdp2_experts.py MODEL_FOLDER. It trains, saves, and goes on from what it has saved.
"""

import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from as_on_gpu import output
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight

accelerator = Accelerator()
torch.manual_seed(0)
targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
options = LoraConfig(r=8, target_modules=["q_proj"], target_parameters=targets)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), options)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
model, optimizer = accelerator.prepare(model, adamw)


def frozen():
    shards = [local(p) for p in model.parameters() if p.ndim == 3]
    return [shard for shard in shards if isinstance(shard, Float8FrozenWeight)]


def step():
    ids = torch.arange(64).view(2, 32) % 60 + 4
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


assert len(frozen()) == 4
assert all(shard.shape[0] == 2 for shard in frozen())  # two experts of four
codes = [shard.qdata.view(torch.uint8).clone() for shard in frozen()]
losses = [step() for _ in range(3)]
assert losses[-1] < losses[0], losses
accelerator.save_state(str(output / "lora"))
following = step()
accelerator.load_state(str(output / "lora"))
assert step() == following
for shard, before in zip(frozen(), codes, strict=True):
    assert torch.equal(shard.qdata.view(torch.uint8), before)
state = accelerator.get_state_dict(model)
assert all(type(value) is torch.Tensor for value in state.values())
print(f"rank {dist.get_rank()}: trained {losses[-1]:.3f}\n", end="", flush=True)
dist.barrier()
# Without it gloo may end a process at exit: "terminate called without an active exception". The
# threads and collectives that are left are those of BF16: gloo's three, and no Work.
os._exit(0)
