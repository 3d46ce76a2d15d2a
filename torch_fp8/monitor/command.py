"""The sub-command ``torch-fp8 report``."""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch_fp8.monitor.html_report import write_report
from torch_fp8.monitor.run_log import read_run


def add_parser(commands: Any) -> None:
    """Add it to the sub-commands of the command."""
    report = commands.add_parser(
        "report",
        help="one HTML page, and PNGs, of what a run's monitor has measured",
        description=(
            "Draw what a run with FP8Config(monitor=N) has measured: the loss with its events, "
            "layers and steps as heat maps, the worst tensors, what fell back and why. Exit "
            "status: 0 all is well, 1 there is nothing to draw, 2 a mistake in the call."
        ),
    )
    report.add_argument("path", type=Path, metavar="RUN", help="its folder, or the file in it")
    report.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where to write (default: RUN/fp8_report)"
    )
    report.add_argument(
        "--beside",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="other runs whose losses are drawn, too",
    )
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    try:
        record = read_run(options.path)
        beside = {path.name: read_run(path) for path in options.beside}
        folder = options.output or record.path.parent / "fp8_report"
        written = write_report(record, folder, beside)
    except (OSError, ValueError, ImportError) as error:
        print(f"torch-fp8 report: {error}", file=sys.stderr)
        return 1
    for note in record.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{written[0]}: {len(record.steps)} measured steps, {len(record.events)} events")
    for path in written[1:]:
        print(path)
    return 0
