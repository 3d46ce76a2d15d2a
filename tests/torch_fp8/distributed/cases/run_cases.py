"""Runs cases on one of several gloo ranks and writes, as JSON, what each returns or how it fails.

``python run_cases.py <rank> <number of ranks> <store> <result> <module,module ...> [name ...]``: a
name is that of a test with `on_ranks`, or a part of the names of cases; see conftest.py.
"""

import datetime
import gc
import importlib
import json
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist

from tests.torch_fp8.distributed.ranks import RANK, RANKS, equal_on_ranks, gathered, worst_sum  # noqa: F401  (the cases import them from here)


def bodies(module, names):
    """Yield the name and the function of each test and each case to run on this rank."""
    for name, function in list(vars(importlib.import_module(module)).items()):
        if name in names and hasattr(function, "body"):
            yield name, function.body
        elif name.startswith("case_") and (not names or any(part in name for part in names)):
            yield name.removeprefix("case_"), function


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
    for name, body in (found for module in modules.split(",") for found in bodies(module, names)):
        try:
            results[name] = {"value": body()}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
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
