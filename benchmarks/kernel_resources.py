"""Registers, spills and shared memory of every Triton kernel, compiled without a card.

    python -m benchmarks.kernel_resources

The tests that compile what is launched for Hopper and Blackwell (``test_*compiled.py``) record what
the assembler made of each variant; this runs them with every variant for both, of which the tests
compile a covering part, and writes the record down. A row is a kernel,
its compile-time choices and the type of its first pointer: where several inputs differ in sizes or
strides alone, the most registers and the most spilled bytes among them. The last columns are the
version of Triton and the digest of the kernels' code: when that changes, a test asks for a new run.
"""

import ast
import csv
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kernel_resources.csv"
KERNELS = ROOT / "torch_fp8" / "kernels"
COLUMNS = ("kernel", "variant", "target", "registers", "spilled_bytes", "shared_bytes", "warps")
LAUNCHING = ("driver.py", "launch_tape.py", "quick_launch.py")
"""Modules about when and how launches happen, which compile nothing."""
_USED = re.compile(
    r"Resources\(registers=(\d+), stack=(\d+), local=(\d+), shared=(\d+), warps=(\d+)"
)


def digest(folder: Path = KERNELS) -> str:
    """Return 12 hexadecimal digits for the code in `folder`, without comments and docstrings, and
    without `LAUNCHING`.
    """
    code = []
    for path in sorted(p for p in folder.glob("*.py") if p.name not in LAUNCHING):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                node.body = [part for part in node.body if not _is_text(part)]
        code += [path.name, ast.unparse(tree)]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
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
        options = ["-q", "--every-variant", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", *options, *selection]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
        return merged(rows_of(report))


def main() -> None:
    tests = sorted(ROOT.glob("tests/torch_fp8/kernels/test_*compiled.py"))
    code = {"triton": metadata.version("triton"), "digest": digest()}
    rows = measure("-n", "auto", *map(str, tests))
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *code))
        writer.writeheader()
        writer.writerows(row | code for row in rows)
    worst = [row for row in rows if row["spilled_bytes"]]
    print(f"{len(rows)} variants, {len(worst)} with spills, in {RESULTS}")


if __name__ == "__main__":
    main()
