"""The sub-command ``torch-fp8 env``."""

import argparse
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
    add, flag = env.add_argument, {"action": "store_true"}
    add("--self-test", **flag, help="test the kernels and each recipe here (a few minutes)")
    add("--only", nargs="+", type=_subject, choices=SUBJECTS, metavar="SUBJECT",
        help=f"only these of the self-test, without hosts: {', '.join(SUBJECTS)}")  # fmt: skip
    add("--all", **flag, help="print a line for everything, with the hosts' extension points")
    add("--json", **flag, help="print JSON instead of tables")
    run = "torch_fp8_tools.env.machine:describe"
    env.set_defaults(run=run, parser=env, mistakes=(), failures=())


def _subject(name: str) -> str:
    if name in REMOVED:
        raise argparse.ArgumentTypeError(f"'{name}' is no longer tested alone: {REMOVED[name]}")
    return name
