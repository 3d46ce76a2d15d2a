"""Ranks that ask for different things; each prints what its Accelerator says.

``different``: ``TORCH_FP8_CONFIG`` is set on rank 1 alone. ``missing``: rank 1 asks for BF16.
"""

import datetime
import os
import sys

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs


def say(text):
    os.write(1, f"{text}\n".encode())  # at once: the ranks share one pipe


rank = int(os.environ["RANK"])
precision = "fp8"
if sys.argv[1] == "different" and rank == 1:
    os.environ["TORCH_FP8_CONFIG"] = '{"opt_level": "O3", "recipe": "rowwise"}'
if sys.argv[1] == "missing" and rank == 1:
    precision = "bf16"
short = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=5))
try:
    accelerator = Accelerator(mixed_precision=precision, cpu=True, kwargs_handlers=[short])
except ValueError as error:
    say(f"rank {rank}: {error}")
else:
    say(f"rank {rank}: went on")
    # As a model's DDP would: a collective to which nobody comes.
    try:
        accelerator.wait_for_everyone()
    except RuntimeError:
        say(f"rank {rank}: alone")
os._exit(0)
