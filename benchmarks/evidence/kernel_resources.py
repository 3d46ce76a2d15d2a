"""Registers, spills and shared memory of every Triton kernel, compiled without a card.

    python -m benchmarks.evidence.kernel_resources  # runs/benchmarks/kernel_resources.csv
    python -m benchmarks.evidence.kernel_resources --changed  # variants without rows of this code

The tests that compile kernels for Hopper and Blackwell (``test_*compiled.py``) report the resources
of each variant. The tests alone compile a covering part; this command runs them with every variant
for both cards, and writes the CSV. A row is a kernel,
its compile-time choices and the type of its first pointer. If several inputs differ only in sizes
or strides, it has the most registers and the most spilled bytes among them. It also has the
version of Triton and the digest of the kernel's code and of all code that it calls: if the digest
changes, or a variant without a row is launched, a test fails until this command has run again.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.rows import ROOT, add_csv, write_rows
from tests.kernel_code import RESOURCES as RESULTS
from tests.kernel_code import digests

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
    """Return rows of COLUMNS of the tests in `selection`, which are arguments of pytest.

    A test that fails, because a kernel spills, has reported what it compiled until then.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "--every-variant", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", *options, *selection]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
        return merged(rows_of(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "compile only variants that the committed CSV lacks, and copy the rest from it"
    parser.add_argument("--changed", action="store_true", help=text)
    add_csv(parser, RESULTS.stem)
    arguments = parser.parse_args()
    tests = sorted(ROOT.glob("tests/torch_fp8/kernels/test_*compiled.py"))
    tests += ROOT.glob("tests/torch_fp8/loss_head/test_*compiled.py")
    changed = ["--unrecorded"] if arguments.changed else []
    rows = measure("-n", "auto", *changed, *map(str, tests))
    version, code = metadata.version("triton"), digests()
    rows = [row | {"triton": version, "digest": code[str(row["kernel"])]} for row in rows]
    write_rows(arguments.csv, (*COLUMNS, "triton", "digest"), rows)
    worst = [row for row in rows if row["spilled_bytes"]]
    print(f"{len(rows)} variants, {len(worst)} with spills, in {arguments.csv}")


if __name__ == "__main__":
    main()
