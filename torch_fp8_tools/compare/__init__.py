"""``torch-fp8 compare``: runs a training command in BF16 and in FP8, and compares the runs.

The command's own process reads the records (`comparison`, `trials`, `outcome`, `tables`). The
programs that it starts load `child`, which overrides the precision, records each optimizer step and
stops.
"""

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the sub-command to those of ``torch-fp8``."""
    parser = commands.add_parser(
        "compare",
        help="run your training command in BF16 and in FP8, and say whether to turn FP8 on",
        description=(
            "Run a training command, unmodified, once in BF16 and once for each FP8 variant, each "
            "for the same number of optimizer steps, from the same seed. Print the time, memory "
            "and loss of each, what ran in FP8, and one sentence of advice. A second call "
            "continues after the last trial that was completed. Exit status: 0 compared, 1 BF16 "
            "or every FP8 variant failed, 2 a mistake in the call, 130 interrupted."
        ),
        usage="torch-fp8 compare [options] -- COMMAND ...",
    )
    add, whole = parser.add_argument, {"type": _positive, "metavar": "N"}
    add("program", nargs="+", metavar="COMMAND", help="after --, as you would type it")
    add("--steps", **whole, default=200, help="optimizer steps of each trial (default: 200)")
    add("--variants", nargs="+", default=["bf16", "O2"], metavar="VARIANT",
        help="bf16, levels, recipes, fields of FP8Config: 'O3, rowwise' (bf16 O2)")  # fmt: skip
    add("--seeds", **whole, default=1, help="trials of each variant, each from its own seed (1)")
    add("--output", type=Path, metavar="FOLDER",
        help="where everything goes (default: fp8_compare/ and the program's name)")  # fmt: skip
    add("--stall", **whole, default=30, help="minutes without a step that end a trial (30)")
    add("--no-repeat", action="store_true", help="do not run BF16 twice to measure the noise")
    add("--fast-cpu", action="store_true",
        help="compute BF16 products in float32, on CPUs without fast ones")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run="torch_fp8_tools.compare.comparison:compare")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
