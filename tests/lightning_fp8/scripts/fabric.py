"""fabric.py HOST STRATEGY DEVICES [PRECISION]: two steps of a loop over `HOST`'s Fabric."""

import importlib
import sys

host, strategy, devices, *flag = sys.argv[1:]
precision = {"precision": flag[0]} if flag else {}
L = importlib.import_module(host)

import torch  # noqa: E402  (the host comes first, as in most scripts)
from torch import nn  # noqa: E402


def train(fabric):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        loss = model(torch.randn(4, 32, device=fabric.device)).pow(2).mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


def main():
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=int(devices), **precision)
    if strategy == "auto":
        train(fabric)
    else:
        fabric.launch(train)


if __name__ == "__main__":
    main()
