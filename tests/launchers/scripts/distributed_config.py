"""``distributed_config.py {tp,fsdp} FOLDER``: transformers shards a model as it loads it.

A loop of one's own trains it, without Accelerate; prints the losses, or why FP8 is refused.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import torch_fp8
from torch_fp8.distributed import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import split_sharded

kind, folder = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=2, num_key_value_heads=4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
dist.barrier()
how = (
    DistributedConfig(tp_size=2, tp_plan="auto") if kind == "tp" else DistributedConfig(fsdp_size=2)
)
model = LlamaForCausalLM.from_pretrained(folder, distributed_config=how)
config = torch_fp8.FP8Config()
try:
    report = torch_fp8.convert_to_float8(model, config)
except ValueError as error:
    os.write(1, f"rank {rank} refused: {error}\n".encode())
    os._exit(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
split_sharded(model, [optimizer], config)
gathers = connect_fsdp(model, config).num_gathers
torch.manual_seed(rank)
ids = torch.randint(0, 256, (2, 16))
losses = []
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
text = " ".join(map(str, losses))
os.write(1, f"rank {rank} converted {len(report.converted)} gathers {gathers}: {text}\n".encode())
os._exit(0)
