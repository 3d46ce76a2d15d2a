"""DDP at every level: each rank prints what it ends with. Usage: replicas.py MODE..."""

import sys
import warnings

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs

LEVELS = {
    "O1": FP8Config(opt_level="O1"),
    "O2": FP8Config(),
    "O3": FP8Config(opt_level="O3"),
    "unused": FP8Config(opt_level="O3"),
    "late": FP8Config(),
}


def train(mode: str) -> str:
    handlers = [FP8Kwargs(LEVELS[mode])]
    if mode == "unused":
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=handlers,
        cpu=True,
        gradient_accumulation_steps=2,
    )
    rank = accelerator.process_index
    torch.manual_seed(rank)  # DDP makes the ranks equal
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    if mode == "late":
        model = accelerator.prepare(model)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    else:
        optimizer, model, scheduler = accelerator.prepare(optimizer, model, scheduler)
    for step in range(8):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), x)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                grad = model.module[0].weight.grad
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    weight = model.module[0].weight
    residual = optimizer.state[weight].get("residual", torch.zeros(1))
    total = sum(p.detach().double().sum() for p in model.parameters())
    return (
        f"{mode} rank {rank}: "
        f"weight {weight.dtype} grad {type(grad).__name__} view {model.gradient_as_bucket_view} "
        f"loss {accelerator.reduce(loss, 'mean').item():.4f} "
        f"sums {total.item():.17g} {residual.double().sum().item():.0f}\n"
    )


for mode in sys.argv[1:]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "gradients stay in BF16")
        print(train(mode), end="", flush=True)
