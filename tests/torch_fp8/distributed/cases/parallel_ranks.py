"""What several modules of cases of tensor, sequence and pipeline parallelism need."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from tests.internals import sqnr_db
from tests.torch_fp8.distributed.ranks import RANK, RANKS
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

WIDTH = 64


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """As of a Llama: x (batch, tokens, WIDTH)."""

    def __init__(self, bias=False, hidden=128):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(bias)
        self.gate, self.up = (nn.Linear(WIDTH, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Pair(nn.Module):
    def __init__(self, width=WIDTH, hidden=128, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def mesh_of():
    return init_device_mesh("cpu", (RANKS,))


def block_plan(again=False):
    column = {"input_layouts": Shard(1), "gather_in_backward": again}
    return {
        "norm1": SequenceParallel(use_local_output=True),
        "norm2": SequenceParallel(use_local_output=True),
        "attention": PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), gather_in_backward=again
        ),
        **{f"attention.{name}": Float8ColwiseParallel() for name in "qkv"},
        "attention.o": Float8RowwiseParallel(output_layouts=Shard(1)),
        "gate": Float8ColwiseParallel(**column),
        "up": Float8ColwiseParallel(**column),
        "down": Float8RowwiseParallel(output_layouts=Shard(1)),
    }


def pair_plan(sequence=True, dim=1, again=False):
    if not sequence:
        return {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()}
    return {
        "up": Float8ColwiseParallel(input_layouts=Shard(dim), gather_in_backward=again),
        "down": Float8RowwiseParallel(output_layouts=Shard(dim)),
    }


def parallel(model, plan, config=None, mesh=None, first="parallelize"):
    """A converted and parallelized copy; on the other hand one that is only converted."""
    one, config = copy.deepcopy(model), config or FP8Config()
    convert_to_float8(one, config)
    if first == "convert":
        convert_to_float8(model, config)
    model = parallelize_module(model, mesh or mesh_of(), plan)
    convert_to_float8(model, config)
    return model, one


def part(x, dim=1, rank=RANK, ranks=RANKS):
    parts = x.chunk(ranks, dim)
    return parts[rank] if rank < len(parts) else x.narrow(dim, 0, 0)


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def db(reference, x):
    """SQNR in dB, at most 200 for JSON."""
    return min(float(sqnr_db(reference.detach().float(), full(x).detach().float())), 200.0)


def rand(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
