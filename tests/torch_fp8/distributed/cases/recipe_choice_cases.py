"""Chooses recipes on one of two gloo ranks whose cards are not equally fast; writes JSON.

Started by test_recipe_choice_ranks.py: ``python recipe_choice_cases.py <rank> <ranks> <store>
<result>``.
"""

import datetime
import json
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.internals import autotune, kept_payloads, layer_benchmark, layer_shapes
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    connect_ddp,
    connect_fsdp,
)
from torch_fp8.ops.one_rank import answer_of_one, can_ask

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
FASTEST = ("rowwise", "blockwise")[RANK]  # by this rank's clock
runs = 0


def seconds(device, run):
    """Each rank finds another recipe the fastest, and that another layer is faster in BF16."""
    global runs
    runs += 1
    if run.recipe is None:
        return 2.0
    loses = run.layers[0].out_features == (48, 80)[RANK]
    return 3.0 if loses else 1.0 if run.recipe.name == FASTEST else 1.5


def model():
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 48), nn.Linear(48, 80))


def choice(net=None, tokens=16):
    """What a conversion chose, with whose measurement, and how often it warned."""
    before = runs
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = convert_to_float8(net or model(), FP8Config(tokens=tokens))
    skipped = [name for name, _ in report.skipped]
    return {
        "recipe": report.recipe.name,
        "skipped": skipped,
        "measured": runs > before,
        "warned": sum("without measuring" in str(w.message) for w in warned),
    }


def fail(device, run):
    raise RuntimeError("no memory")


def shapes(net):
    layers = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    return {name: str(shape) for name, shape in layer_shapes(net, layers).items()}


def sharded(data, tensor):
    """A model sharded over `tensor` ranks by tensor parallelism, over `data` by FSDP2."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    net = model()
    if tensor > 1:
        plan = {"0": Float8ColwiseParallel(), "1": Float8RowwiseParallel()}
        parallelize_module(net, mesh["tensor"], plan)
    if data > 1 or tensor == 1:
        for layer in net:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
    return net


def step(net):
    """Whether the gradients of a step are finite; and what FSDP2 gathers in FP8."""
    report = connect_fsdp(net, FP8Config())
    x = torch.randn(16, 64, requires_grad=True)
    net(x).square().sum().backward()
    grads = [x.grad, *(getattr(p.grad, "_local_tensor", p.grad) for p in net.parameters())]
    return all(bool(g.isfinite().all()) for g in grads), report.num_gathers


def payloads():
    """How many payloads of weights are kept where one rank has no memory for them."""
    kept_payloads.free_bytes = lambda device: (1 - RANK) << 40
    net, config = model(), FP8Config(recipe="tensorwise")
    convert_to_float8(net, config)
    optimizer = torch.optim.AdamW(net.parameters())
    return convert_optimizer(optimizer, config, model=net).num_cached


def slow_answer():
    time.sleep(6)
    return "late"


def main():
    autotune.runs_natively = lambda device, recipe: True
    layer_benchmark.seconds = seconds
    results = {}
    os.environ["WORLD_SIZE"] = str(RANKS)
    early, config = model(), FP8Config(tokens=24)
    results["early"] = str(convert_to_float8(early, config).choice)
    if RANK == 1:  # on its own, before there is anybody to agree with
        results["before"] = choice()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=RANK,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=30),
    )
    try:
        connect_ddp(DistributedDataParallel(early), [], config)
    except ValueError as error:
        results["early, wrapped"] = str(error)
    results["together"] = choice(tokens=32)
    results["again"] = choice(tokens=32)
    results["after"] = choice()  # rank 1 has measured this one already
    if RANK == 1:
        results["alone"] = choice(nn.Linear(64, 112))
    results["stages"] = choice(nn.Linear(64, 128) if RANK == 0 else nn.Linear(64, 144))
    results["payloads"] = payloads()
    for name, data, tensor in (("fsdp", RANKS, 1), ("tensor", 1, RANKS)):
        net = sharded(data, tensor)
        results[name] = choice(net, tokens=64)
        results[f"shapes under {name}"] = shapes(net)
        results[f"step under {name}"] = step(net)
    # As after a restart by torchrun, before which a rank had asked and not answered.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    results["restarted"] = choice(tokens=32)
    layer_benchmark.seconds = fail
    results["failed"] = choice(tokens=128)
    results["failed again"] = choice(tokens=128)
    assert can_ask()
    dist.barrier()
    dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=2))
    time.sleep(RANK)
    try:
        results["late"] = answer_of_one("how late?", slow_answer)
    except RuntimeError as error:
        results["late"] = str(error)
    with open(sys.argv[4], "w") as file:
        json.dump(results, file)
    dist.barrier()
    os._exit(0)  # gloo may hang at exit


main()
