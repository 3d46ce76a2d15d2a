"""The options of the sub-commands of ``torch-fp8``, in the order of the help."""

import argparse
from pathlib import Path
from typing import Any

from torch_fp8.quantization.recipe import RECIPES, SAVE_FORMATS
from torch_fp8_tools import compare
from torch_fp8_tools.env.result import SUBJECTS
from torch_fp8_tools.plan.layouts import PRESETS
from torch_fp8_tools.plan.setup import CARDS, LEVELS, METHODS

FORMATS = "; ".join(f"{name} ({', '.join(recipes)})" for name, recipes in SAVE_FORMATS.items())
REMOVED = {
    "recipes": f"it tests each of {', '.join(RECIPES)}; name those you want",
    "speed": "FP8Config(recipe='auto') times the recipes on your layers",
    "hosts": "torch-fp8 env reports whether they are extended, and a short run tests the flag",
    "exchange": "a short run on two processes tests it",
}
"""Former parts of the self-test, and what to use instead of each."""


def add_parsers(commands: Any) -> None:
    """Add each sub-command, with the name of the function that runs it."""
    for add_parser in (_env, _export, _convert_optimizer, _plan, _report, compare.add_parser):
        add_parser(commands)


def _env(commands: Any) -> None:
    env = commands.add_parser(
        "env",
        help="show versions, cards, recipes, autoload and hosts of this machine; --self-test tests "
        "them",
        description=(
            "Show what this machine offers for FP8 training. Exit status: 0 all is well, 1 "
            "something failed, 2 a mistake in the call."
        ),
    )
    add, flag = env.add_argument, {"action": "store_true"}
    add("--self-test", **flag, help="test the kernels and each recipe here (a few minutes)")
    add("--only", nargs="+", type=_subject, choices=SUBJECTS, metavar="SUBJECT",
        help=f"only these of the self-test, without hosts: {', '.join(SUBJECTS)}")  # fmt: skip
    add("--all", **flag, help="print a line for everything, with the hosts' extended modules")
    add("--json", **flag, help="print JSON instead of tables")
    run = "torch_fp8_tools.env.machine:describe"
    env.set_defaults(run=run, parser=env, mistakes=(), failures=())


def _export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint in an FP8 format that inference engines load",
        description=(
            "Write a Hugging Face checkpoint as an FP8 one, with the bytes that training with this "
            "recipe multiplies by. Tensors are read and cast one after the other. Exit "
            "status: 0 all is well, 1 something failed, 2 a mistake in the call."
        ),
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder")
    add("path", type=Path, metavar="OUTPUT", help="a folder that does not exist")
    add("--format", choices=list(SAVE_FORMATS),
        help=f"format, and the recipes it expresses: {FORMATS}")  # fmt: skip
    add("--recipe", choices=RECIPES, help="recipe of the training run")
    add("--config", metavar="JSON", help="options of FP8Config, as JSON or the path of a file")
    add("--device", default="cpu", help="where tensors are cast (default: cpu)")
    add("--max-shard-size", default="5GB", metavar="SIZE",
        help="most bytes of a file (default: 5GB)")  # fmt: skip
    parser.set_defaults(run="torch_fp8_tools.export_checkpoint:export", is_whole=True)


def _convert_optimizer(commands: Any) -> None:
    parser = commands.add_parser(
        "convert-optimizer",
        help="convert an optimizer's 8-bit states to the format of stock AdamW",
        description=(
            "Write an optimizer's checkpoint, saved with FP8Config(checkpoint_states='fp8'), in "
            "the format of torch.optim.AdamW. Exit status: 0 all is well, 1 a file cannot be read "
            "or written, 2 a mistake in the call."
        ),
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT",
                        help="a file that torch.save wrote: optimizer.pt of transformers, "
                        "optimizer.bin of Accelerate, a .ckpt of Lightning")  # fmt: skip
    parser.add_argument("path", type=Path, metavar="OUTPUT", help="a file that does not exist")
    parser.set_defaults(run="torch_fp8_tools.stock_states:convert")


def _plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="estimate memory and communication of a training run before you rent a GPU",
        description=(
            "Estimate what a training run needs on each GPU, in BF16 and at each level. The "
            "training code itself counts the bytes. Exit status: 0 planned, 1 no level fits, "
            "2 a mistake in the call, 130 interrupted."
        ),
        epilog=f"Presets: {', '.join(PRESETS)}.",
    )
    add, whole = parser.add_argument, {"type": int, "metavar": "N"}
    add("model", help="a preset, a folder with a config.json, or a config.json")
    add("--level", nargs="+", choices=LEVELS, metavar="LEVEL",
        help=f"only these of {', '.join(LEVELS)}")  # fmt: skip
    add("--gpus", **whole, nargs="+", default=[1], help="number of GPUs (default: 1)")
    add("--card", default="h100", help=f"one of {', '.join(CARDS)}")
    add("--memory", type=float, metavar="GIB", help="memory of each GPU (default: the card's)")
    add("--sequence", **whole, help="tokens per sequence (default: model's, at most 4096)")
    add("--micro-batch", **whole, default=1, help="sequences per forward on a GPU (default: 1)")
    add("--accumulate", **whole, default=1, help="micro-batches per step (default: 1)")
    add("--data", **whole, help="replicas (default: what --fsdp leaves, else 1)")
    add("--fsdp", **whole, help="shards per replica (default: what others leave)")
    add("--tensor", **whole, default=1, help="degree of tensor parallelism")
    add("--pipeline", **whole, default=1, help=argparse.SUPPRESS)  # refused by name
    add("--recipe", choices=("auto", *RECIPES), default="auto",
        help="FP8 recipe (default: auto, planned as tensorwise)")  # fmt: skip
    add("--checkpointing", action="store_true", help="recompute layers in backward")
    add("--method", default="full",
        help=f"train all weights, or adapters: {', '.join(METHODS)} (default: full)")  # fmt: skip
    add("--rank", **whole, default=16, help="rank of LoRA's adapters (default: 16)")
    add("--json", action="store_true", help="print JSON instead of tables")
    mistakes = (ValueError, TypeError, ImportError, OSError)
    run = "torch_fp8_tools.plan.plan:run"
    parser.set_defaults(run=run, mistakes=mistakes, is_whole=True)


def _report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="draw what a run's monitor measured as PNGs, and print its events and worst tensors",
        description=(
            "Show what a run with FP8Config(monitor=N) has measured: layers and steps as heat maps "
            "in PNGs; the worst tensors, what fell back and why, in tables. Exit status: 0 all is "
            "well, 1 there is nothing to show, 2 a mistake in the call."
        ),
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="its folder, or the file in it")
    parser.add_argument("--output", type=Path, metavar="FOLDER",
                        help="where to write (default: RUN/fp8_report)")  # fmt: skip
    run = "torch_fp8_tools.report.report:report"
    parser.set_defaults(run=run, mistakes=(), failures=(ValueError, ImportError))


def _subject(name: str) -> str:
    if name in REMOVED:
        raise argparse.ArgumentTypeError(f"'{name}' is no longer tested alone: {REMOVED[name]}")
    return name
