"""An Accelerate loop that prints the loss of each step exactly, on every rank."""

import os

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for batch in data:
    loss = nn.functional.mse_loss(model(batch), batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
text = " ".join(value.hex() for value in losses)
weight = type(accelerator.unwrap_model(model)[0]).__name__
line = f"rank {accelerator.process_index} losses {weight} {accelerator.num_processes} {text}\n"
os.write(1, line.encode())  # at once: ranks share one pipe
accelerator.end_training()
