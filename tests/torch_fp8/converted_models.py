"""Small models of each kind of converted module, beside the same in float32."""

import copy

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.torch_fp8.block_models import MLP, JoinedMLP
from torch_fp8 import FP8Config, convert_to_float8, freeze

SIZE = 32


def _linears():
    return [nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)]


_KINDS = {
    "linear": _linears,
    "Conv1D": lambda: [Conv1D(SIZE, SIZE), nn.Tanh(), Conv1D(SIZE, SIZE)],
    "frozen": _linears,
    "LayerNorm": lambda: [nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)],
    "RMSNorm": lambda: [nn.RMSNorm(SIZE, eps=1e-5), nn.Linear(SIZE, SIZE)],
    "SwiGLU": lambda: [MLP(SIZE, 48, bias=True)],
    "joined SwiGLU": lambda: [JoinedMLP(SIZE, 48, bias=True)],
    "Smooth-SwiGLU": lambda: [MLP(SIZE, 48, bias=True)],
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
