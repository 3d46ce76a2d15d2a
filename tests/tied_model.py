"""A small model with tied weights, and modules that conversion leaves, for tests of conversion."""

import torch
from torch import nn


class Model(nn.Module):
    """An embedding tied to lm_head, two blocks, odd sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(2)
        )
        self.lm_head = nn.Linear(32, 48, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return self.lm_head(x)


LINEARS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, 32, bias=False)})


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.top_k = 2
        self.gate_up_proj = nn.Parameter(torch.randn(8, 32, 64))
