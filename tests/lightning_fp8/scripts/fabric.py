"""fabric.py HOST STRATEGY DEVICES [PRECISION]: two steps of a loop over `HOST`'s Fabric.

STRATEGY may be model-parallel: FSDP2 on two processes, by `ModelParallelStrategy`.
"""

import importlib
import sys

host, strategy, devices, *flag = sys.argv[1:]
precision = {"precision": flag[0]} if flag else {}
L = importlib.import_module(host)

import torch  # noqa: E402  (the host comes first, as in most scripts)
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402


def shard(net, mesh):
    fully_shard(net[0], mesh=mesh["data_parallel"])  # a linear layer that is a unit itself
    fully_shard(net, mesh=mesh["data_parallel"])
    return net


def train(fabric):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    if strategy == "model-parallel":
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        loss = model(torch.randn(4, 32, device=fabric.device)).pow(2).mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


def main():
    chosen = strategy
    if strategy == "model-parallel":
        from lightning.fabric.strategies import ModelParallelStrategy

        chosen = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = L.Fabric(accelerator="cpu", strategy=chosen, devices=int(devices), **precision)
    if strategy == "auto":
        train(fabric)
    else:
        fabric.launch(train)


if __name__ == "__main__":
    main()
