"""Two ranks that end their process group and make another one, thrice, in the same processes.

Generations 0, 2 and 3 have both ranks, generation 1 rank 0 alone. They share a store, with a prefix
each as torchft has: gloo itself fails where it finds the addresses of an earlier group. Prints what
each generation's agreement and training came to.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import connect_ddp, connect_fsdp, ddp_options
from torch_fp8.distributed.agreement import check_same_config

RANK = int(os.environ["RANK"])
base = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, RANK == 0)


def losses(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    config = FP8Config(recipe="tensorwise", agreement_timeout=20)
    convert_to_float8(model, config)
    if kind == "fsdp":
        fully_shard(model)
        connect_fsdp(model, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        convert_optimizer(optimizer, config, model=model)
        wrapped = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
        connect_ddp(wrapped, [optimizer], config)
        model = wrapped
    values = []
    for step in range(3):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + RANK))
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item().hex())
    return " ".join(values)


def refusal(config):
    try:
        check_same_config(config)
    except ValueError as error:
        return str(error).partition(". ")[0]
    return "agreed"


def say(generation, text):
    os.write(1, f"rank {RANK} generation {generation}: {text}\n".encode())


for generation in range(4):
    ranks = 2
    if generation == 1:
        if RANK == 1:
            continue
        ranks = 1
    store = dist.PrefixStore(f"generation {generation}", base)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=ranks)
    if generation == 2:
        say(generation, refusal(FP8Config(seed=RANK, agreement_timeout=20)))
    say(generation, f"ddp {losses('ddp')}")
    say(generation, f"fsdp {losses('fsdp')}")
    if generation == 0 and RANK == 0:  # the other one has left in the middle of a comparison
        say(generation, refusal(FP8Config(agreement_timeout=1)))
    dist.barrier()
    dist.destroy_process_group()
say("end", "reached")
os._exit(0)
