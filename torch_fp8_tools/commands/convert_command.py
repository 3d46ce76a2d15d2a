"""The sub-command ``torch-fp8 convert-optimizer``."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the sub-command to those of ``torch-fp8``."""
    converted = commands.add_parser(
        "convert-optimizer",
        help="convert an optimizer's 8-bit states to the format of stock AdamW",
        description=(
            "Write an optimizer's checkpoint, saved with FP8Config(checkpoint_states='fp8'), in "
            "the format of torch.optim.AdamW. Exit status: 0 all is well, 1 a file cannot be read "
            "or written, 2 a mistake in the call."
        ),
    )
    converted.add_argument("checkpoint", type=Path, metavar="CHECKPOINT",
                           help="a file that torch.save wrote: optimizer.pt of transformers, "
                           "optimizer.bin of Accelerate, a .ckpt of Lightning")  # fmt: skip
    converted.add_argument("path", type=Path, metavar="OUTPUT", help="a file that does not exist")
    converted.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit status."""
    from torch_fp8_tools.commands.stock_states import convert_optimizer_file

    print(convert_optimizer_file(options.checkpoint, options.path))
    return 0
