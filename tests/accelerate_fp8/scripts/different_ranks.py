"""Rank 1 alone has ``TORCH_FP8_CONFIG``; each rank prints what its Accelerator says."""

import os

from accelerate import Accelerator

rank = os.environ["RANK"]
if rank == "1":
    os.environ["TORCH_FP8_CONFIG"] = '{"recipe": "rowwise"}'
said = "went on"
try:
    Accelerator(mixed_precision="fp8", cpu=True)
except ValueError as error:
    said = str(error)
os.write(1, f"rank {rank}: {said}\n".encode())  # at once: the ranks share one pipe
os._exit(0)
