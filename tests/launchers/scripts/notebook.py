"""What a notebook's cell does: trains in two processes by ``notebook_launcher``."""

import os
import runpy
import sys
from pathlib import Path

from accelerate import notebook_launcher


def train():
    # Accelerate's launcher exports the precision under another name than Accelerator reads.
    os.environ["ACCELERATE_MIXED_PRECISION"] = sys.argv[2]
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


if __name__ == "__main__":
    notebook_launcher(train, num_processes=2, mixed_precision="fp8", use_port=sys.argv[1])
