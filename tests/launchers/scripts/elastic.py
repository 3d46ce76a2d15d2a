"""Trains under ``torchrun --nnodes=1:2``, step by step, until the file ``stop`` is there.

Prints the number of ranks at the start and the loss of each step.
"""

import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(mixed_precision="fp8", cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
os.write(1, f"ranks {accelerator.num_processes} pid {os.getpid()}\n".encode())
while True:
    x = torch.randn(8, 64)
    loss = nn.functional.mse_loss(model(x), x)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    # All ranks end in one step, or none does.
    stop = torch.tensor(float(Path("stop").exists()))
    if accelerator.reduce(stop, "max") > 0:
        break
    time.sleep(0.05)
os.write(1, b"done\n")
