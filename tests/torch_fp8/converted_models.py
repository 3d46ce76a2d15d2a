"""Small models of each kind of converted module, beside the same in float32."""

import copy

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from torch_fp8 import FP8Config, convert_to_float8, freeze

SIZE = 32


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(SIZE, 48, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(48, SIZE), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class JoinedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(SIZE, 96), nn.Linear(48, SIZE)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act_fn(gate))


def _linears():
    return [nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)]


_KINDS = {
    "linear": _linears,
    "Conv1D": lambda: [Conv1D(SIZE, SIZE), nn.Tanh(), Conv1D(SIZE, SIZE)],
    "frozen": _linears,
    "LayerNorm": lambda: [nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)],
    "RMSNorm": lambda: [nn.RMSNorm(SIZE, eps=1e-5), nn.Linear(SIZE, SIZE)],
    "SwiGLU": lambda: [GatedMLP()],
    "joined SwiGLU": lambda: [JoinedMLP()],
    "Smooth-SwiGLU": lambda: [GatedMLP()],
}
KINDS = tuple(_KINDS)


def stock_and_converted(kind, recipe="tensorwise"):
    """A model in float32, and the same converted; of frozen weights the first has the values."""
    torch.manual_seed(0)
    stock = nn.Sequential(*_KINDS[kind]())
    for parameter in stock.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
    stock.requires_grad_(kind != "frozen")
    converted = copy.deepcopy(stock)
    smooth = kind == "Smooth-SwiGLU"
    convert_to_float8(converted, FP8Config(recipe=recipe, smooth_swiglu=smooth))
    if kind == "frozen":
        freeze(converted)
        stock.load_state_dict(converted.state_dict())
    return stock, converted
