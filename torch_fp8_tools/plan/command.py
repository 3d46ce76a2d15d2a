"""The sub-command ``torch-fp8 plan``."""

import argparse
import gc
import inspect
import json
from typing import Any

from torch_fp8.quantization.recipe import RECIPES
from torch_fp8_tools.plan.layouts import PRESETS
from torch_fp8_tools.plan.setup import CARDS, LEVELS, METHODS, ROLES, Setup


def add_parser(commands: Any) -> None:
    """Add the sub-command to those of ``torch-fp8``."""
    parser = commands.add_parser(
        "plan",
        help="estimate memory and communication of a training run before you rent a GPU",
        description=(
            "What a training run needs from each GPU, in BF16 and at each level. Bytes are counted "
            "by the training code. Exit status: 0 planned, 1 no level fits, 2 a mistake in the "
            "call, 130 interrupted."
        ),
        epilog=f"Presets: {', '.join(PRESETS)}.",
    )
    parser.add_argument("model", help="a preset, a folder with a config.json, or a config.json")
    parser.add_argument("--level", nargs="+", choices=LEVELS, metavar="LEVEL",
                        help=f"only these of {', '.join(LEVELS)}")  # fmt: skip
    whole = {"type": int, "metavar": "N"}
    parser.add_argument("--gpus", **whole, nargs="+", default=[1], help="their number (default: 1)")
    parser.add_argument("--card", default="h100", help=f"one of {', '.join(CARDS)}")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of each GPU (the card's)")
    parser.add_argument("--sequence", **whole, help="tokens of a sequence (at most 4096)")
    parser.add_argument("--micro-batch", **whole, default=1, help="sequences of a forward of a GPU")
    parser.add_argument("--accumulate", **whole, default=1, help="micro-batches of a step")
    parser.add_argument("--data", **whole, help="replicas of the model (what --fsdp leaves, or 1)")
    parser.add_argument("--fsdp", **whole, help="shards of a replica (what the others leave)")
    parser.add_argument("--tensor", **whole, default=1, help="degree of tensor parallelism")
    parser.add_argument("--pipeline", **whole, default=1, help="pipeline stages")
    parser.add_argument("--recipe", choices=("auto", *RECIPES), default="auto",
                        help="FP8 recipe (default: auto, planned as tensorwise)")  # fmt: skip
    parser.add_argument("--checkpointing", action="store_true",
                        help="compute layers again in backward")  # fmt: skip
    parser.add_argument("--method", choices=METHODS, default="full",
                        help="all weights, adapters, or RLHF (default: full)")  # fmt: skip
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES),
                        help="models of --method rlhf (all four)")  # fmt: skip
    parser.add_argument("--rank", **whole, default=16, help="of LoRA's adapters (default: 16)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    mistakes = (ValueError, TypeError, ImportError, OSError)
    parser.set_defaults(run=run, mistakes=mistakes, is_whole=True)


def run(options: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit status."""
    collects = gc.isenabled()
    gc.disable()  # what a step saves for backward is freed without it
    try:
        return _plan(options)
    finally:
        if collects:
            gc.enable()


def _plan(options: argparse.Namespace) -> int:
    from torch_fp8_tools.plan.plan import plan

    levels = tuple(options.level or LEVELS)
    if len(options.gpus) > 1:
        raise ValueError(
            "--gpus no longer takes several numbers: plan one after the other, such as --gpus "
            f"{options.gpus[0]}"
        )
    result = plan(options.model, levels=levels, gpus=options.gpus[0], **_arguments(options))
    if options.json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        print(result, end="")
    return 0 if result.fits else 1


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    names = inspect.signature(Setup).parameters.keys() - {"model", "gpus", "roles"}
    arguments = {name: getattr(options, name) for name in names}
    if options.method == "rlhf":
        arguments["roles"] = tuple(options.roles)
    return arguments
