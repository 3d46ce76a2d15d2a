"""The sub-command ``torch-fp8 check``."""

import argparse
from pathlib import Path
from typing import Any

from torch_fp8.quantization.recipe import RECIPES


def add_parser(commands: Any) -> None:
    """Add the sub-command to those of ``torch-fp8``."""
    parser = commands.add_parser(
        "check",
        help="run a few batches through a model and propose a recipe for each layer",
        description=(
            "Run a few batches through a model in BF16, try FP8 casts on the input of each layer, "
            "and propose a recipe for each, with reasons. Exit status: 0 proposed, 1 something "
            "failed, 2 a mistake in the call, 130 interrupted."
        ),
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder of transformers")
    parser.add_argument(
        "data", type=Path, nargs="?", metavar="DATA", help="text or JSONL (none: random tokens)"
    )
    parser.add_argument("--recipe", choices=RECIPES, default="tensorwise", help="of the model")
    whole: dict[str, Any] = {"type": _positive, "metavar": "N"}
    parser.add_argument("--batches", **whole, default=4, help="(default: 4)")
    parser.add_argument("--micro-batch", **whole, default=2, help="sequences of one (default: 2)")
    parser.add_argument("--sequence", **whole, help="tokens of one (512, or the model's most)")
    parser.add_argument("--field", default="text", help="of a JSONL file (default: text)")
    parser.add_argument("--seed", type=int, default=0, help="of random tokens (default: 0)")
    parser.add_argument("--device", default="cpu", help="where it runs (default: cpu)")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="write the configuration there, for TORCH_FP8_CONFIG")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run="torch_fp8_tools.check.check:check", is_whole=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
