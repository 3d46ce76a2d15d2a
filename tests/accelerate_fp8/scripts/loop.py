"""An ordinary Accelerate loop, Accelerate imported first."""

from accelerate import Accelerator
from accelerate.utils import set_seed

import sys  # isort: skip

import torch
from torch import nn

accelerator = Accelerator(
    gradient_accumulation_steps=2, mixed_precision=sys.argv[1] if len(sys.argv) > 1 else None
)
set_seed(0)
layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
data = torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=4)
model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
for batch in data:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(batch), batch)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
weight = accelerator.unwrap_model(model)[0].weight
layer = type(accelerator.unwrap_model(model)[2])
print(f"rank {accelerator.process_index}: layer {layer.__module__}.{layer.__name__}")
print(f"rank {accelerator.process_index}: weights {weight.double().sum().item():.17g}")
assert loss.isfinite()
