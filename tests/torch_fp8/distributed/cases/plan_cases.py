"""Trains small layouts on gloo ranks, and counts what rank 0 holds and sends.

Started by test_sharded_plan.py, ``python plan_cases.py <rank> <ranks> <store> <result>``, with the
names of layouts behind these.
"""

import contextlib
import dataclasses
import functools
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.comm_counter import count_communication
from tests.internals import shard
from tests.torch_fp8_tools.plan.layouts_for_tests import WIDE, adam, levels_of, trained
from torch_fp8 import FP8Config, memory_report
from torch_fp8.distributed import connect_ddp, connect_fsdp, ddp_options, split_sharded

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])


def prepare_shards(mesh, model, config):
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    if config is not None and config.opt_level != "O1":
        split_sharded(model, [optimizer], config)
    if config is not None:
        connect_fsdp(model, config)
    return model, optimizer


def prepare_replica(model, config):
    model, optimizer = adam(model, config)
    options = {} if config is None else ddp_options(model, [optimizer])
    wrapped = DistributedDataParallel(model, **options)
    if config is not None:
        connect_ddp(wrapped, [optimizer], config)
    return wrapped, optimizer


def count(layout, level, prepare):
    """Return the bytes after a step, with the gradients of another, and those that it sent."""
    config = FP8Config(recipe="tensorwise", opt_level=level) if level.startswith("O") else None
    sent = []

    @contextlib.contextmanager
    def watched():
        with count_communication() as made:
            yield
        sent.append(made.bytes_sent)

    model, optimizer = trained(layout, config, prepare, watched)
    counted = dataclasses.asdict(memory_report(model, optimizer))
    return {"memory": counted, "wire": sent[0]}


def main():
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    ways = [(name, name, functools.partial(prepare_shards, mesh)) for name in sys.argv[5:]]
    ways.append(("replicas", WIDE, prepare_replica))
    if RANKS == 4:
        halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        ways.append(("halves", WIDE, functools.partial(prepare_shards, halves)))
    results = {
        f"{way} {level}": count(layout, level, prepare)
        for way, layout, prepare in ways
        for level in levels_of(way, RANKS)
    }
    with open(sys.argv[4], "w") as file:
        json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
