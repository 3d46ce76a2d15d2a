"""Ranks whose data differ in size: prints the largest amax that each has seen of its input."""

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(3):
    x = torch.full((8, 32), 1.0 + 9 * accelerator.process_index)
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
history = accelerator.unwrap_model(model)[0].fp8_amax_history
print(f"rank {accelerator.process_index}: amaxes {history[0, :3].tolist()}")
