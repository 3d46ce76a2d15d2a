"""Trains small layouts on gloo ranks, sharded by FSDP2, and counts what rank 0 holds.

Started by test_sharded_plan.py: ``python plan_cases.py <rank> <ranks> <store> <result>``.
"""

import dataclasses
import json
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.torch_fp8.planner.layouts_for_tests import LAYOUTS, trained
from torch_fp8 import FP8Config, memory_report
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import split_sharded
from torch_fp8.planner.models import shard

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])


def count(layout, level, mesh):
    """Return the bytes after a step, with the gradients of another."""
    config = FP8Config(recipe="tensorwise", opt_level=level) if level.startswith("O") else None

    def sharded(model):
        shard(model, mesh)
        if config is not None and level == "O1":
            connect_fsdp(model, config)

    def convert(optimizer, config, model):
        split_sharded(model, [optimizer], config)
        connect_fsdp(model, config)

    model, optimizer = trained(layout, config, sharded, convert)
    return dataclasses.asdict(memory_report(model, optimizer))


def main():
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    levels = ("bf16-mixed", "O1", "O2", "O3")
    results = {f"{name} {level}": count(name, level, mesh) for name in LAYOUTS for level in levels}
    with open(sys.argv[4], "w") as file:
        json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
