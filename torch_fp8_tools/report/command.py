"""The sub-command ``torch-fp8 report``."""

import argparse
import sys
from collections.abc import Sequence
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
    report.add_argument("--compare", type=Path, nargs="+", default=[], metavar="RUN",
                        help="other runs, whose losses are drawn and compared too")  # fmt: skip
    report.set_defaults(run=_report, mistakes=(), failures=(ValueError, ImportError))


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest distinct names of folders: their last parts."""
    most = max(len(folder.parts) for folder in folders)
    for count in range(1, most + 1):
        names = ["/".join(folder.parts[-count:]) or "run" for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return [f"{n}, again" if n in names[:i] else n for i, n in enumerate(names)]


def _named(file: Path) -> Path:
    """Return the folder of a run, or the file of a further model in it."""
    return file.parent if file.name == FILE_NAME else file.with_suffix("")


def _report(options: argparse.Namespace) -> int:
    record, *others = map(read_run, (options.path, *options.compare))
    name, *names = names_of([_named(run.path.resolve()) for run in (record, *others)])
    model = record.path.stem.removeprefix(Path(FILE_NAME).stem)
    folder = options.output or record.path.parent / f"fp8_report{model}"
    beside = dict(zip(names, others, strict=True))
    for other, run in beside.items():
        lost = [] if run.losses else ["The run has no losses, so nothing was drawn."]
        record.notes += [f"{other}: {note}" for note in (*run.notes, *lost)]
    written = write_figures(record, folder, beside, name)
    for note in record.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{name}: {len(record.steps)} measured steps, {len(record.events)} events")
    print(f"{tables(record)}\n")
    for path in written:
        print(path)
    return 0
