"""Fabric on two processes with setup_module and setup_optimizers apart, in both orders."""

import lightning as L
import torch
from torch import nn

from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.tensor.split_weight import SplitWeight


def make_net():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def train(fabric):
    wrapped_first, optimizer_first = make_net(), make_net()
    model = fabric.setup_module(wrapped_first)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    other_optimizer = fabric.setup_optimizers(torch.optim.AdamW(optimizer_first.parameters()))
    other_model = fabric.setup_module(optimizer_first)
    for trained, stepped in ((model, optimizer), (other_model, other_optimizer)):
        for _ in range(2):
            stepped.zero_grad()
            fabric.backward(trained(torch.randn(4, 64)).pow(2).mean())
            stepped.step()
        assert isinstance(stepped.optimizer, Float8Optimizer)
    assert not isinstance(wrapped_first[0].weight, SplitWeight)
    assert isinstance(optimizer_first[0].weight, SplitWeight)
    assert model._forward_module.gradient_as_bucket_view


if __name__ == "__main__":
    fabric = L.Fabric(accelerator="cpu", strategy="ddp_fork", devices=2, precision="fp8-mixed")
    fabric.launch(train)
