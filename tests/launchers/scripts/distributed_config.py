"""``distributed_config.py {tp,fsdp,ep} FOLDER [accelerate|trainer]``: transformers shards a model
as it loads it, with ``ep`` a mixture of experts.

A loop of one's own trains it, or a host; prints the losses, or why FP8 is refused.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import torch_fp8
from torch_fp8.distributed import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import split_sharded

kind, folder, *hosts = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    sizes |= {"vocab_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, **experts) if kind == "ep" else LlamaConfig(**sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
dist.barrier()
options = {
    "tp": {"tp_size": 2, "tp_plan": "auto"},
    "fsdp": {"fsdp_size": 2},
    "ep": {"fsdp_size": 2, "ep_size": 2},
}
how = DistributedConfig(**options[kind])
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=how)
ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(rank))
losses = []


def train_by_accelerate():
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(4):
        loss = prepared(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def train_by_trainer():
    arguments = transformers.TrainingArguments(
        folder + "-out", max_steps=4, use_cpu=True, report_to=[], save_strategy="no",
        per_device_train_batch_size=2, learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids] * 8
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    losses.append(trainer.train().training_loss)


if hosts:
    import accelerate
    import transformers

    try:
        {"accelerate": train_by_accelerate, "trainer": train_by_trainer}[hosts[0]]()
    except Exception as error:
        os.write(1, f"rank {rank} refused: {type(error).__name__}: {error}\n".encode())
        os._exit(0)
    os.write(1, f"rank {rank} trained: {losses}\n".encode())
    os._exit(0)
config = torch_fp8.FP8Config()
try:
    report = torch_fp8.convert_to_float8(model, config)
except ValueError as error:
    os.write(1, f"rank {rank} refused: {error}\n".encode())
    os._exit(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
split_sharded(model, [optimizer], config)
gathers = connect_fsdp(model, config).num_gathers
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
text = " ".join(map(str, losses))
os.write(1, f"rank {rank} converted {len(report.converted)} gathers {gathers}: {text}\n".encode())
os._exit(0)
