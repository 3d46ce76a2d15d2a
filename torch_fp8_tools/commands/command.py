"""The sub-commands ``torch-fp8 export`` and ``torch-fp8 convert-optimizer``."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from torch_fp8.quantization.recipe import RECIPES, SAVE_FORMATS

_FORMATS = "; ".join(f"{name} ({', '.join(recipes)})" for name, recipes in SAVE_FORMATS.items())


def add_parser(commands: Any) -> None:
    """Add both sub-commands to those of ``torch-fp8``."""
    exported = commands.add_parser(
        "export",
        help="write a checkpoint in an FP8 format that inference engines load",
        description=(
            "Write a Hugging Face checkpoint as an FP8 one, with the bytes that training with this "
            "recipe multiplies by. Tensors are read, cast and written one after the other. Exit "
            "status: 0 all is well, 1 something failed, 2 a mistake in the call."
        ),
    )
    exported.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder")
    exported.add_argument("path", type=Path, metavar="OUTPUT", help="a folder that does not exist")
    exported.add_argument("--format", choices=list(SAVE_FORMATS),
                          help=f"format, and the recipes it expresses: {_FORMATS}")  # fmt: skip
    exported.add_argument("--recipe", choices=RECIPES, help="recipe of the training run")
    exported.add_argument("--config", metavar="JSON",
                          help="options of FP8Config, as JSON or the path of a file")  # fmt: skip
    exported.add_argument("--device", default="cpu", help="where tensors are cast (default: cpu)")
    exported.add_argument("--max-shard-size", default="5GB", metavar="SIZE",
                          help="most bytes of a file (default: 5GB)")  # fmt: skip
    exported.set_defaults(run=export, is_whole=True)
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
    converted.set_defaults(run=convert)


def convert(options: argparse.Namespace) -> int:
    """Convert a file with an optimizer's states; returns the exit status."""
    from torch_fp8_tools.commands.stock_states import convert_optimizer_file

    print(convert_optimizer_file(options.checkpoint, options.path))
    return 0


def export(options: argparse.Namespace) -> int:
    """Export a checkpoint; returns the exit status."""
    from torch_fp8.config import FP8Config
    from torch_fp8_tools.commands.export_checkpoint import export_checkpoint
    from torch_fp8_tools.env.cards import usable_device
    from torch_fp8_tools.host_models import model_class, model_folder

    if options.format is None:
        raise ValueError(f"name the format with --format: {_FORMATS}")
    config = FP8Config() if options.config is None else FP8Config.from_json(options.config)
    if options.recipe is not None:
        config = dataclasses.replace(config, recipe=options.recipe)
    checkpoint = model_folder(options.checkpoint) or options.checkpoint
    written = (checkpoint, options.path, options.format, config)
    device, most = usable_device(options.device), options.max_shard_size
    cls = model_class(checkpoint)
    print(export_checkpoint(cls, *written, device=device, max_shard_size=most))
    return 0
