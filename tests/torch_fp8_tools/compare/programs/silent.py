"""A Fabric loop that prints and logs nothing, and sets no seed."""

import torch
from lightning.fabric import Fabric
from torch import nn

fabric = Fabric(precision="bf16-mixed")
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
rows = torch.randn(2048, 64)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, 32, shuffle=True))
for _ in range(4):
    for x in loader:
        fabric.backward((model(x) - x.flip(1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
