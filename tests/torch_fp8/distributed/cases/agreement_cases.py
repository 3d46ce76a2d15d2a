"""Checks configurations on one of four gloo ranks, in turn; run by run_cases.py."""

import os
import socket
import time
import warnings

import torch.distributed as dist
from run_cases import RANK, RANKS

import torch_fp8
from tests.comm_counter import count_communication
from tests.internals import agreement, check_same_config
from torch_fp8 import FP8Config


def error(config, group=None):
    with count_communication() as count:
        try:
            check_same_config(config, group)
        except ValueError as raised:
            return str(raised), [row.payload_bytes for row in count.rows]
    return None, [row.payload_bytes for row in count.rows]


def case_configurations():
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
    name = torch_fp8.__version__
    agreement.__version__ = "0.0.9" if RANK == 3 else name
    socket.gethostname = lambda: f"node-{RANK // 2}"
    results["version"] = error(FP8Config())
    agreement.__version__ = name
    agreement.card_name = lambda device: f"H{RANK // 2}00 (sm_90)"
    results["cards and auto"] = error(FP8Config())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results["cards"] = error(FP8Config(recipe="rowwise"))
    results["warned"] = [str(warning.message) for warning in warned]
    agreement.card_name = lambda device: "the CPU"
    # One comparison after the other: none may take a rank's description of the one before.
    results["many"] = [error(FP8Config(seed=seed))[0] for seed in range(200)]
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if RANK == 3:
        time.sleep(4)  # it comes when the others have given up
    agreement._WARN_AFTER = 1
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results["late"] = error(FP8Config(agreement_timeout=2))
    results["waiting"] = [str(warning.message) for warning in warned]
    # A rank goes on as a script without FP8 does, into a collective that nobody else comes to.
    for missing in (3, 0):
        store.add(f"before {missing}", 1)
        while store.add(f"before {missing}", 0) < RANKS:
            time.sleep(0.01)
        start = time.monotonic()
        config = FP8Config(agreement_timeout=2)
        results[f"missing {missing}"] = error(config) if missing != RANK else (None, [])
        results[f"waited for {missing}"] = time.monotonic() - start
    return results
