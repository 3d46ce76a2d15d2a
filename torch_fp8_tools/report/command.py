"""The sub-command ``torch-fp8 report``."""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch_fp8.monitor.run_log import FILE_NAME
from torch_fp8_tools.report.report import tables, write_figures
from torch_fp8_tools.report.run_record import read_run


def add_parser(commands: Any) -> None:
    """Add the sub-command to those of ``torch-fp8``."""
    report = commands.add_parser(
        "report",
        help="draw what a run's monitor measured as PNGs, and print its events and worst tensors",
        description=(
            "Show what a run with FP8Config(monitor=N) has measured: the loss with its events, and "
            "layers and steps as heat maps, in PNGs; the worst tensors, what fell back and why, in "
            "tables. Exit status: 0 all is well, 1 there is nothing to draw, 2 a mistake in the "
            "call."
        ),
    )
    report.add_argument("path", type=Path, metavar="RUN", help="its folder, or the file in it")
    report.add_argument("--output", type=Path, metavar="FOLDER",
                        help="where to write (default: RUN/fp8_report)")  # fmt: skip
    report.set_defaults(run=_report, mistakes=(), failures=(ValueError, ImportError))


def _report(options: argparse.Namespace) -> int:
    record = read_run(options.path)
    model = record.path.stem.removeprefix(Path(FILE_NAME).stem)
    written = write_figures(record, options.output or record.path.parent / f"fp8_report{model}")
    for note in record.notes:
        print(f"note: {note}", file=sys.stderr)
    name = record.path.resolve().parent.name
    print(f"{name}: {len(record.steps)} measured steps, {len(record.events)} events")
    print(f"{tables(record)}\n")
    for path in written:
        print(path)
    return 0
