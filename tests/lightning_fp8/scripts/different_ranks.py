"""different_ranks.py: TORCH_FP8_CONFIG is set on rank 1 of Fabric's 2 alone; what each is told."""

import datetime
import os

import lightning_fabric
from lightning_fabric.strategies import DDPStrategy

# Lightning starts rank 1 itself, with this set.
RANK = int(os.environ.get("LOCAL_RANK", 0))
if RANK == 1:
    os.environ["TORCH_FP8_CONFIG"] = '{"opt_level": "O1", "communication": "off"}'
options = {"strategy": DDPStrategy(timeout=datetime.timedelta(seconds=60)), "accelerator": "cpu"}
said = "went on"
try:
    lightning_fabric.Fabric(devices=2, precision="fp8-mixed", **options).launch()
except ValueError as error:
    said = str(error)
os.write(1, f"rank {RANK}: {said}\n".encode())  # at once: the ranks share one pipe
os._exit(0)
