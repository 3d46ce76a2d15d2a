"""Registers, spills and shared memory of every Triton kernel, compiled without a card.

    python -m benchmarks.kernel_resources

The tests that compile what is launched for Hopper and Blackwell (``test_*compiled.py``) record what
the assembler made of each variant; this runs them, with every variant for both, which the tests
leave out where registers abound, and writes the record down. A row is a kernel,
its compile-time choices and the type of its first pointer: where several inputs differ in sizes or
strides alone, the most registers and the most spilled bytes among them.
"""

import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kernel_resources.csv"
COLUMNS = ("kernel", "variant", "target", "registers", "spilled_bytes", "shared_bytes", "warps")
_USED = re.compile(
    r"Resources\(registers=(\d+), stack=(\d+), local=(\d+), shared=(\d+), warps=(\d+)"
)


def rows_of(report: Path) -> Iterator[dict[str, object]]:
    """Yield a row of COLUMNS for every variant in a report of the tests (JUnit's XML)."""
    for case in ElementTree.parse(report).iter("testcase"):
        for record in case.iter("property"):
            used = _USED.match(record.get("value", ""))
            if used is None:
                continue
            target, kernel, *variant = record.get("name", "").split(" ")
            registers, stack, local, shared, warps = map(int, used.groups())
            values = (kernel, " ".join(variant), target, registers, stack + local, shared, warps)
            yield dict(zip(COLUMNS, values, strict=True))


def merged(rows: Iterator[dict[str, object]]) -> list[dict[str, object]]:
    """Return a row for each kernel, variant, target and number of warps: the largest of the
    others.
    """
    found: dict[tuple[object, ...], dict[str, object]] = {}
    for row in rows:
        key = tuple(row[c] for c in ("kernel", "variant", "target", "warps"))
        kept = found.setdefault(key, row)
        for column in ("registers", "spilled_bytes", "shared_bytes"):
            kept[column] = max(int(str(kept[column])), int(str(row[column])))
    return [found[key] for key in sorted(found, key=str)]


def measure(*selection: str) -> list[dict[str, object]]:
    """Return rows of COLUMNS of the tests that `selection` names, as arguments of pytest.

    A test that fails, since a kernel spills, has recorded what it compiled until then.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "--every-target", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", *options, *selection]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
        return merged(rows_of(report))


def main() -> None:
    tests = sorted(ROOT.glob("tests/torch_fp8/kernels/test_*compiled.py"))
    rows = measure(*map(str, tests))
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    worst = [row for row in rows if row["spilled_bytes"]]
    print(f"{len(rows)} variants, {len(worst)} with spills, in {RESULTS}")


if __name__ == "__main__":
    main()
