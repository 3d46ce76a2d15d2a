"""The rows of CSV files: where they are written, and which code produced them.

    python -m benchmarks.rows    # for each committed CSV, the commit with the code of its rows

A benchmark writes below ``runs/benchmarks``, never over a file of the repository unless you name
one with ``--csv``. It keeps existing rows and does not measure them again, so an interrupted run
continues, and the output at the end covers all rows.

The last column, ``code``, is the `digest` of the code that produced the row, in 12 hexadecimal
digits. Commits can be squashed and moved; a digest is found again wherever the files are the same.
Rows that are older than the column have ``committed with`` and the digest of the commit that added
them, whose code, or a slightly older one, produced them.
"""

import argparse
import csv
import hashlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fp8.checkpoint.files import whole_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OUTPUT = ROOT / "runs" / "benchmarks"
PARTS = (
    "torch_fp8",
    "torch_fp8_tools",
    "accelerate_fp8",
    "lightning_fp8",
    "benchmarks",
    "examples",
)
"""The folders whose Python files are the code."""
CODE = "code"
EARLIER = "committed with "
"""In front of the digest of rows that do not know their own."""


def digest(files: Mapping[str, str]) -> str:
    """Return 12 hexadecimal digits for paths and their contents, as git's ids of blobs."""
    lines = "".join(f"{path} {files[path]}\n" for path in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def code() -> str:
    """Return the digest of the code as it is in the checkout, committed or not."""
    paths = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    return digest({path.relative_to(ROOT).as_posix(): _blob(path.read_bytes()) for path in paths})


def code_of(commit: str) -> str:
    """Return the digest of the code of a commit."""
    listed = _git("ls-tree", "-r", commit, *PARTS)
    entries = (line.split(maxsplit=3) for line in listed)
    return digest({path: blob for _, _, blob, path in entries if path.endswith(".py")})


def commit() -> str:
    """Return the short hash of HEAD, or 'unknown' outside of a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"


def add_csv(parser: argparse.ArgumentParser, name: str) -> None:
    """Add ``--csv``, where rows are written, with a default that is no file of the repository."""
    text = "the rows' file; benchmarks/results has those that are committed"
    parser.add_argument("--csv", type=Path, default=OUTPUT / f"{name}.csv", help=text)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV, or none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace `path` by these rows, with the digest of the code as the last column.

    The whole file is written each time, so a cut-off run keeps its rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [*(column for column in columns if column != CODE), CODE]
    with whole_file(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, columns, restval="", extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows({**row, CODE: row.get(CODE) or _AT_START} for row in rows)


def tell_kept(path: Path) -> None:
    """Print which rows will not be measured again; call it if you continue a file."""
    kept = len(read_rows(path))
    if kept:
        print(f"{kept} rows are in {path}: they are printed, not measured again", flush=True)


def append_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a CSV."""
    write_rows(path, columns, [*read_rows(path), *rows])


def commits_of(wanted: set[str]) -> dict[str, str]:
    """Return the newest commit with each of these digests, if the history has one."""
    found: dict[str, str] = {}
    for commit in _git("log", "--format=%h"):
        if wanted <= found.keys():
            break
        found.setdefault(code_of(commit), commit)
    return found


def origins(folder: Path = RESULTS) -> Iterator[tuple[str, int, str]]:
    """Yield the name of each CSV, a number of rows, and the code that these rows have in common."""
    for path in sorted(folder.glob("*.csv")):
        said = [row.get(CODE, "") for row in read_rows(path)]
        for value in dict.fromkeys(said):
            yield path.name, said.count(value), value


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    found = list(origins())
    commits = commits_of({value.removeprefix(EARLIER) for *_, value in found})
    for name, count, value in found:
        commit = commits.get(value.removeprefix(EARLIER), "no commit of this history")
        print(f"{name:28} {count:5} rows  {value:28} {commit}")


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()


def _git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


_AT_START = code()
"""Before a run of hours, in which somebody may change a file."""

if __name__ == "__main__":
    main()
