"""The sub-command ``torch-fp8 env``."""

import argparse
from pathlib import Path
from typing import Any

from torch_fp8.quantization.recipe import RECIPES

SUBJECTS = ("kernels", *RECIPES, "frozen")
"""The subjects of the self-test, each of which can be requested alone."""
REMOVED = {
    "recipes": f"it tests each of {', '.join(RECIPES)}; name those you want",
    "speed": "FP8Config(recipe='auto') times the recipes on your layers",
    "hosts": "torch-fp8 env reports whether they are extended, and a short run tests the flag",
    "exchange": "a short run on two processes tests it",
}
"""Former parts of the self-test, and what to take in place of each."""


def add_parser(commands: Any) -> None:
    """Add the sub-command to those of ``torch-fp8``."""
    env = commands.add_parser(
        "env",
        help="show versions, cards, recipes, autoload and hosts of this machine; --self-test tests "
        "them",
        description=(
            "Show what this machine offers for FP8 training. Exit status: 0 all is well, 1 "
            "something failed, 2 a mistake in the call."
        ),
    )
    env.add_argument(
        "--self-test",
        action="store_true",
        help="test the kernels and each recipe on this machine (a few minutes)",
    )
    env.add_argument(
        "--only",
        nargs="+",
        type=_subject,
        choices=SUBJECTS,
        metavar="SUBJECT",
        help=f"only these subjects of the self-test, without hosts: {', '.join(SUBJECTS)}",
    )
    env.add_argument(
        "--all",
        action="store_true",
        help="print a line for everything, including the extension points of the hosts",
    )
    env.add_argument("--json", action="store_true", help="print JSON instead of tables")
    env.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a report to attach to an issue; with --self-test one is written anyway",
    )
    env.set_defaults(run=run, parser=env, mistakes=(), failures=())


def _subject(name: str) -> str:
    if name in REMOVED:
        raise argparse.ArgumentTypeError(f"'{name}' is no longer tested alone: {REMOVED[name]}")
    return name


def run(options: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit status."""
    from torch_fp8_tools.env.machine import describe

    return describe(options)
