"""user_code_ranks.py LEVEL FOLDER [WAY...]: one rank of the walk of user code, in each loop."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.host_loops import WAYS, rank
from tests.weight_walk import walk

level, folder, *ways = sys.argv[1:]
for way in ways or WAYS:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8" if way == "trainer" else "no"
    own = Path(folder) / way
    own.mkdir(exist_ok=True)
    walk(way, level, own)
    if rank() == 0:
        print(way, flush=True)
dist.destroy_process_group()
