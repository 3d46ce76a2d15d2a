"""losses.csv of a run, read."""

import csv
from pathlib import Path


def read_losses(path: Path) -> list[dict]:
    """Return the rows of a losses.csv as numbers; a cell that is empty is left out of its row."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [
            {name: float(cell) for name, cell in row.items() if cell}
            for row in csv.DictReader(file)
        ]
    return [{**row, "step": int(row["step"])} for row in rows]
