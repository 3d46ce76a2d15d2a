"""The sub-command ``torch-fp8 env``."""

import argparse
from pathlib import Path
from typing import Any

SECTIONS = ("kernels", "recipes", "speed", "hosts", "exchange")
"""The parts of the self-test that can be requested separately."""


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
        help="test the kernels, the recipes, the hosts and the exchange between processes (a few "
        "minutes)",
    )
    env.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        metavar="PART",
        help=f"only these parts of the self-test: {', '.join(SECTIONS)}",
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
    env.set_defaults(run=run, parser=env)


def run(options: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit status."""
    from torch_fp8.environment.machine import describe

    return describe(options)
