"""Shards models on ranks that differ; run by run_cases.py."""

import torch
from run_cases import RANK, RANKS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import connect_fsdp


def connected(difference=None, steps=0):
    """The error, or the loss of each step; between steps a generation in inference mode."""
    differs = RANK == 1 and difference
    width = 96 if differs == "width" else 64
    layers = [nn.Linear(64, width), nn.Linear(width, 64)]
    layers += [nn.Linear(64, 64)] if differs == "depth" else []
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    skip = ("1",) if differs == "skip" else ("lm_head",)
    config = FP8Config(recipe="tensorwise")
    convert_to_float8(model, FP8Config(recipe="tensorwise", skip=skip))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in layers if differs != "sharding" else []:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        connect_fsdp(model, config)
    except ValueError as error:
        return str(error)
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.inference_mode():
            model(torch.ones(2, 64))
    return losses


def case_agreement():
    said = {name: connected(name) for name in ("width", "depth", "skip", "sharding")}
    return {**said, "same": connected(steps=3)}
