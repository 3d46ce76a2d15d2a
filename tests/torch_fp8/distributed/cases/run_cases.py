"""Runs cases on one of several gloo ranks and writes, as JSON, what each returns or how it fails.

``python run_cases.py <rank> <number of ranks> <store> <result> <module,module ...> [part of the
names of cases to run ...]``; see `run_cases` in conftest.py.
"""

import datetime
import gc
import importlib
import inspect
import json
import math
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist

RANK, RANKS = (int(arg) for arg in sys.argv[1:3])


def gathered(tensor):
    """Every rank's tensor, in float32."""
    tensor = tensor.detach().to_dense().float().contiguous()
    every = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(every, tensor)
    return every


def equal_on_ranks(tensors):
    """Whether each tensor is the same on all ranks, NaN included."""
    every = [gathered(tensor) for tensor in tensors]
    return all(t.nan_to_num(12345.0).equal(of[0].nan_to_num(12345.0)) for of in every for t in of)


def worst_sum(pairs):
    """The lowest and highest projection of sums on the exact ones, and the lowest ratio, dB."""
    pairs = [(made.double(), exact.double()) for made, exact in pairs if exact.numel()]
    projections = [float((made * exact).sum() / exact.square().sum()) for made, exact in pairs]
    noise = max(float((made - exact).norm() / exact.norm()) for made, exact in pairs)
    return [min(projections), max(projections), -20 * math.log10(max(noise, 1e-9))]


def main():
    store, output, modules, *names = sys.argv[3:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # what is imported is no garbage: a collection takes a sixth of a second otherwise
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=RANK,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    members = [inspect.getmembers(importlib.import_module(name)) for name in modules.split(",")]
    for name, case in (member for of_module in members for member in of_module):
        wanted = not names or any(part in name for part in names)
        if not name.startswith("case_") or not wanted:
            continue
        try:
            results[name.removeprefix("case_")] = {"value": case()}
        except Exception:
            results[name.removeprefix("case_")] = {"error": traceback.format_exc()}
            break  # the other ranks may be elsewhere now
        gc.collect()
    with open(output, "w") as file:
        json.dump(results, file)
    if not any("error" in result for result in results.values()):
        dist.barrier()
    # Past the interpreter's teardown, in which gloo's threads and DDP's buckets can deadlock.
    os._exit(0)


if __name__ == "__main__":
    sys.modules["run_cases"] = sys.modules["__main__"]
    main()
