"""Checks configurations on one of four gloo ranks, in turn; the errors are written as JSON.

Started by test_agreement.py: ``python agreement_cases.py <rank> <ranks> <store> <result>``.
"""

import datetime
import json
import os
import sys
import time

import torch.distributed as dist

from torch_fp8 import FP8Config, count_communication
from torch_fp8.distributed.config_check import check_same_config

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])


def error(config, group=None):
    """What the check says; and what it sent."""
    with count_communication() as count:
        try:
            check_same_config(config, group)
        except ValueError as raised:
            return str(raised), [row.payload_bytes for row in count.rows]
    return None, [row.payload_bytes for row in count.rows]


def main():
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=RANK,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=20),
    )
    results = {}
    results["same"] = error(FP8Config(recipe="rowwise", skip=("a", "b")))
    results["level"] = error(FP8Config(opt_level="O3" if RANK == 2 else "O2"))
    several = FP8Config(recipe="rowwise", communication="off" if RANK == 1 else "fp8")
    results["several"] = error(several if RANK else FP8Config())
    results["skip"] = error(FP8Config(skip=("lm_head", "embed") if RANK == 3 else ("lm_head",)))
    os.environ["TORCH_FP8_CONFIG" if RANK == 1 else "UNUSED"] = '{"seed": 3}'
    results["environment"] = error(FP8Config.from_env() or FP8Config())
    # Of a group of its own the ranks are its own, too.
    pair = dist.new_group([1, 3])
    if RANK in (1, 3):
        results["group"] = error(FP8Config(seed=RANK), pair)
    results["again"] = error(FP8Config())
    # As after a restart by torchrun, before which not all ranks had come: the store is the same.
    if RANK != 2:
        dist.distributed_c10d._get_default_store().add(f"torch_fp8/agreement/0/0/turn of {RANK}", 1)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    results["restarted"] = error(FP8Config())
    # Rank 3 goes on as a script without FP8 does, into a collective that nobody else comes to.
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(datetime.timedelta(seconds=2))
    start = time.monotonic()
    results["missing"] = error(FP8Config()) if RANK != 3 else (None, [])
    results["waited"] = time.monotonic() - start
    with open(sys.argv[4], "w") as file:
        json.dump(results, file)
    os._exit(0)  # gloo may hang at exit


main()
