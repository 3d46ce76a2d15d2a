"""Registers, spills and shared memory of every Triton kernel, compiled without a card.

    python -m benchmarks.kernel_resources              # runs/benchmarks/kernel_resources.csv
    python -m benchmarks.kernel_resources --changed    # only what is not recorded of this code

The tests that compile what is launched for Hopper and Blackwell (``test_*compiled.py``) record what
the assembler made of each variant; this runs them with every variant for both, of which the tests
compile a covering part, and writes the record down. A row is a kernel,
its compile-time choices and the type of its first pointer: where several inputs differ in sizes or
strides alone, the most registers and the most spilled bytes among them. Behind these stand the
version of Triton and the digest of the kernel's code and of all that it calls: when that changes,
or a variant is launched that has no row, a test asks for a new run.
"""

import argparse
import ast
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import rows as files
from benchmarks.rows import ROOT, add_csv, write_rows

RESULTS = files.RESULTS / "kernel_resources.csv"
KERNELS = ROOT / "torch_fp8" / "kernels"
COLUMNS = ("kernel", "variant", "target", "registers", "spilled_bytes", "shared_bytes", "warps")
LAUNCHING = ("driver", "launch_tape", "quick_launch")
"""Modules about when and how launches happen, which compile nothing."""
_USED = re.compile(
    r"Resources\(registers=(\d+), stack=(\d+), local=(\d+), shared=(\d+), warps=(\d+)"
)


def digests(folder: Path = KERNELS) -> dict[str, str]:
    """Return 12 hexadecimal digits for each function's code and for what it uses of `folder`,
    without comments and docstrings, and without `LAUNCHING`.
    """
    paths = [path for path in folder.glob("*.py") if path.stem not in LAUNCHING]
    modules = {path.stem: _definitions(path) for path in paths}
    made = {}
    for module, (defined, _) in sorted(modules.items()):
        for name in (n for n, node in defined.items() if isinstance(node, ast.FunctionDef)):
            used: dict[tuple[str, str], str] = {}
            _add_code(modules, module, name, used)
            code = "\n".join(used[key] for key in sorted(used))
            made[name.strip("_")] = hashlib.sha256(code.encode()).hexdigest()[:12]
    return made


def digest(folder: Path = KERNELS) -> str:
    """Return one for all functions."""
    return hashlib.sha256(repr(sorted(digests(folder).items())).encode()).hexdigest()[:12]


_Definitions = tuple[dict[str, ast.stmt], dict[str, tuple[str, str]]]


def _definitions(path: Path) -> _Definitions:
    """Return the statement that defines each name of a module, and where imported ones are from."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            node.body = [part for part in node.body if not _is_text(part)]
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            package, _, source = str(node.module).rpartition(".")
            if package == "torch_fp8.kernels":
                imported |= {a.asname or a.name: (source, a.name) for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        else:
            targets = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
            defined |= {name: node for name in targets if name not in defined}
    return defined, imported


def _add_code(
    modules: dict[str, _Definitions], module: str, name: str, used: dict[tuple[str, str], str]
) -> None:
    """Add the code of a name and of what it uses, unless it is there or from elsewhere."""
    defined, imported = modules.get(module, ({}, {}))
    if name in imported:
        _add_code(modules, *imported[name], used)
    elif name in defined and (module, name) not in used:
        used[module, name] = ast.unparse(defined[name])
        for node in ast.walk(defined[name]):
            if isinstance(node, ast.Name):
                _add_code(modules, module, node.id, used)


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "compile only what the committed record has not, and take the rest from there"
    parser.add_argument("--changed", action="store_true", help=text)
    add_csv(parser, RESULTS.stem)
    arguments = parser.parse_args()
    tests = sorted(ROOT.glob("tests/torch_fp8/kernels/test_*compiled.py"))
    changed = ["--unrecorded"] if arguments.changed else []
    rows = measure("-n", "auto", *changed, *map(str, tests))
    version, code = metadata.version("triton"), digests()
    rows = [row | {"triton": version, "digest": code[str(row["kernel"])]} for row in rows]
    write_rows(arguments.csv, (*COLUMNS, "triton", "digest"), rows)
    worst = [row for row in rows if row["spilled_bytes"]]
    print(f"{len(rows)} variants, {len(worst)} with spills, in {arguments.csv}")


if __name__ == "__main__":
    main()
