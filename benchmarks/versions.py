"""Run a host's tests with its older and newer versions: ``versions.csv``.

``python -m benchmarks.versions --parts lightning-2.5 accelerate-1.10`` creates an environment for
each part, on top of the current one (so that torch is not installed again), installs
the newest release of that minor version and this project as a user would (not editable), runs the
host's tests (`TESTS`) and writes a row. ``--list`` prints the parts in docs/versions.md. A
part can have more packages after ``+``: ``accelerate-1.1+transformers-4.57``.

``--parts newest`` tries the newest torch and hosts that are newer than docs/versions.md promises.
``torch-2.15`` installs that torch, gigabytes, unless the base has it. ``--base PYTHON`` builds on
the environment of another interpreter; its part is then ``python-3.10``.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.rows import add_csv, read_rows, write_rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.csv"
DOCS = ROOT / "docs" / "versions.md"
MARK = "<!-- table: python -m benchmarks.versions --docs -->"
COLUMNS = (
    "host", "version", "python", "torch", "with", "ran", "passed", "failed", "result", "note",
    "commit", "date",
)  # fmt: skip

_ACCELERATE = "tests/accelerate_fp8"
_LIGHTNING = "tests/lightning_fp8"
_ENTRIES = f"{_ACCELERATE}/test_entries.py"
TESTS: dict[str, tuple[str, ...]] = {
    "lightning": (f"{_LIGHTNING}/test_trainer.py", f"{_LIGHTNING}/test_fabric.py"),
    "accelerate": (
        f"{_ACCELERATE}/test_accelerator.py",
        f"{_ACCELERATE}/test_optimizers.py",
        f"{_ENTRIES}::test_launcher_flag_runs_fp8_gemms",
    ),
    "transformers": (f"{_ACCELERATE}/test_trainer.py", "tests/torch_fp8/test_hugging_face.py"),
    # SFT with and without LoRA, DPO, GRPO, reward.
    "trl": (f"{_ENTRIES}::test_trainers_of_transformers_and_trl_run_fp8_gemms",),
    "peft": (f"{_ENTRIES}::test_trainers_of_transformers_and_trl_run_fp8_gemms",),
}
_ENGINE = ("tests/torch_fp8/nn/test_linear.py", "tests/torch_fp8/optim/test_optimizer.py")
TESTS["python"] = (
    *_ENGINE,
    f"{_LIGHTNING}/test_fabric.py",
    f"{_ACCELERATE}/test_accelerator.py",
)
# Not test_accelerator.py, whose meter of GEMMs sees nothing on torch 2.11's CPU path.
TESTS["torch"] = (
    *_ENGINE,
    "tests/benchmarks/test_graph_counts.py",
    "tests/torch_fp8/compile/test_shapes_in_graph.py",
    "tests/torch_fp8/optim/test_embedding_dtype.py",
    f"{_LIGHTNING}/test_fabric.py",
    f"{_ACCELERATE}/test_optimizers.py",
)

# What the table of docs/versions.md is made of, apart from the Pythons, which are other bases.
PARTS = (
    "torch-2.11",
    "torch-2.13",
    "torch-2.14",
    "torch-2.15",
    "lightning-2.3",
    "lightning-2.4",
    "lightning-2.5",
    "lightning-2.6",
    "accelerate-1.8",
    "accelerate-1.9",
    "accelerate-1.10",
    "accelerate-1.15",
    "transformers-4.57+peft-0.19+datasets-4.4",
    "transformers-5.17",
    "transformers-5.23",
    "transformers-5.24",
    # With transformers 5, TRL 0.24 asks for mergekit; PEFT 0.18 cannot import torchao 0.18.
    "trl-0.24+transformers-4.57+peft-0.18+torchao-0.14+datasets-4.4",
    "trl-1.0",
    "trl-1.16",
    "peft-0.18+torchao-0.14",
    "peft-0.19",
    "peft-0.21",
)
_PACKAGES = ("lightning", "accelerate", "transformers", "trl", "peft")
NEWEST = tuple(f"{host}-newest" for host in (*_PACKAGES, "torch"))  # for ``--parts newest``
_NONE_NEWER = "none newer"
_TIMEOUT_S = 3600


def parse(part: str) -> list[tuple[str, str]]:
    """Parse ``accelerate-1.1+transformers-4.57`` as [("accelerate", "1.1"), ("transformers",
    "4.57")].

    Raises:
        ValueError: a host without tests here, or neither a version nor "newest".
    """
    items = []
    for item in part.split("+"):
        name, _, version = item.rpartition("-")
        known = name in TESTS or items  # only the first one has its tests run
        if not known or not name or not re.fullmatch(r"\d+(\.\d+)+|newest", version):
            raise ValueError(
                f"part {part!r}: {item!r} is not HOST-VERSION with one of {', '.join(TESTS)}"
            )
        items.append((name, version))
    return items


def requirements(items: Iterable[tuple[str, str]]) -> list[str]:
    """Return requirements for pip: the newest release of each minor version."""
    wanted = []
    for name, version in items:
        if name == "python":
            continue
        if version == "newest":
            spec = f">={after(tried(read_rows(RESULTS), name)[1])}"
        else:
            spec = f"=={version}.*" if version.count(".") == 1 else f"=={version}"
        wanted.append(name + spec)
        if name == "lightning":  # the same code, published a second time
            wanted.append(f"pytorch-lightning{spec}")
    return wanted


def make_environment(base: str, folder: Path, wanted: Sequence[str], source: Path) -> str:
    """Make an environment in `folder` with packages over those of `base`; return its Python.

    Args:
        base: an interpreter.
        folder: place of the new environment.
        wanted: requirements for pip.
        source: this project, which is installed too.
    Raises:
        subprocess.CalledProcessError: pip failed; its output is in the exception.
    """
    _run([base, "-m", "venv", str(folder)])
    python = str(folder / "bin" / "python")
    below = _ask(base, "import sysconfig; print(sysconfig.get_path('purelib'))")
    own = _ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    # addsitedir also reads the .pth files of that folder, as those of setuptools.
    (Path(own) / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # A venv may bring a setuptools that is too old to build this project.
    _run([*install, "setuptools>=77", *wanted])
    _run([*install, "--no-deps", "--no-build-isolation", str(source)])
    return python


def snapshot(folder: Path) -> Path:
    """Copy the tracked files to `folder`, so that you can edit them during a run."""
    for name in _run(["git", "-C", str(ROOT), "ls-files"]).splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


def run_part(part: str, base: str, keep: Path | None = None) -> dict[str, object]:
    """Return the row of one part.

    Args:
        part: a part, see `parse`.
        base: the interpreter whose environment lies below.
        keep: folder for the tests' output, or None to discard it.
    """
    items = parse(part)
    host, asked = items[0]
    ran = " ".join(TESTS[host])
    row: dict[str, object] = {"host": host, "version": asked, "ran": ran}
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        try:
            source = snapshot(Path(folder) / "source")
            venv = Path(folder) / "venv"
            python = make_environment(base, venv, requirements(items), source)
        except subprocess.CalledProcessError as error:
            note = _last_line(error)
            missing = asked == "newest" and "No matching distribution" in note
            row |= {"result": _NONE_NEWER if missing else "not installed", "note": note}
            return _with_origin(row)
        row.update(_versions(python, host, asked))
        shutil.rmtree(source / "build", ignore_errors=True)  # of the installation
        output = _test(python, TESTS[host], source)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{part}.txt").write_text(output)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", output)}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    works = passed > 0 and failed == 0
    failures = re.findall(r"^(?:FAILED|ERROR) .*?::(\S+)", output, re.MULTILINE)
    note = "" if works else "; ".join(dict.fromkeys(failures[:3])) or output.strip()[-200:]
    row.update(passed=passed, failed=failed, result="works" if works else "fails", note=note)
    return _with_origin(row)


def write(rows: Iterable[Mapping[str, object]], path: Path) -> None:
    """Add `rows`, each replacing an earlier one with the same versions."""
    kept = {_key(row): row for row in read_rows(path)}
    kept.update({_key(row): row for row in rows})
    ordered = sorted(kept.values(), key=lambda r: (list(TESTS).index(r["host"]), _sortable(r)))
    write_rows(path, COLUMNS, ordered)


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Return the table of docs/versions.md."""
    lines = [
        "| host | version | Python | torch | with | tests | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [str(row[name] or "") for name in ("host", "version", "python", "torch", "with")]
        counted = f"{row['passed']} passed" + (f", {row['failed']} failed" if row["failed"] else "")
        counted = counted.replace(", 0 failed", "")
        cells += [counted if row["passed"] not in ("", None) else "", str(row["result"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tried(rows: Iterable[Mapping[str, object]], host: str) -> tuple[str, str]:
    """Return the lowest and highest minor version of a host that works, such as ("1.8", "1.15")."""
    found = [minor(str(r["version"])) for r in rows if (r["host"], r["result"]) == (host, "works")]
    return tuple(".".join(map(str, end)) for end in (min(found), max(found)))  # type: ignore[return-value]


def write_docs(path: Path = DOCS) -> None:
    """Put the rows into docs/versions.md, in place of the table between its two marks."""
    before, _, rest = path.read_text().partition(MARK)
    _, _, after = rest.partition(MARK)
    path.write_text(f"{before}{MARK}\n{table(read_rows(RESULTS))}{MARK}{after}")


def minor(version: str) -> tuple[int, int]:
    """Return (1, 10) for "1.10.1"."""
    major, second = version.split(".")[:2]
    return int(major), int(second)


def after(version: str) -> str:
    """Return "1.11" for "1.10"."""
    major, second = minor(version)
    return f"{major}.{second + 1}"


def _key(row: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(str(row.get(name, "")) for name in ("host", "version", "python", "torch", "with"))


def _sortable(row: Mapping[str, object]) -> tuple[object, ...]:
    release = tuple(map(int, re.findall(r"\d+", str(row["version"]))))
    return release, *(str(row.get(name, "")) for name in ("python", "torch", "with"))


def _versions(python: str, host: str, asked: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, platform\n"
        f"names = {[*_PACKAGES, 'torch']!r}\n"
        "found = {n: m.version(n) for n in names if any(m.distributions(name=n))}\n"
        "print(json.dumps({'python': platform.python_version(), **found}))"
    )
    found = json.loads(_ask(python, code))
    others = [f"{n} {found[n]}" for n in _PACKAGES if n in found and n != host]
    needed = _related(host)
    shown = [text for text in others if text.split()[0] in needed]
    return {
        "version": found.get(host, asked).partition("+")[0],
        "python": found["python"],
        "torch": found["torch"],
        "with": ", ".join(shown),
    }


def _related(host: str) -> tuple[str, ...]:
    """Return the other packages that a host's tests import."""
    if host == "lightning":
        return ()
    return _PACKAGES if host in ("torch", "python") else _PACKAGES[1:]


def _test(python: str, files: Sequence[str], source: Path) -> str:
    command = [python, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *files]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TEST_FORKED": "0",
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
    }
    try:
        done = subprocess.run(
            command, cwd=source, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"ERROR ::longer than {_TIMEOUT_S} s"
    return done.stdout + done.stderr


def _with_origin(row: dict[str, object]) -> dict[str, object]:
    commit = _run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]).strip()
    return {**row, "commit": commit, "date": datetime.date.today().isoformat()}


def _ask(python: str, code: str) -> str:
    return _run([python, "-c", code]).strip()


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _last_line(error: subprocess.CalledProcessError) -> str:
    lines = [line for line in error.stderr.splitlines() if line.strip()]
    if lines and "ResolutionImpossible" in lines[-1]:  # which excludes what, pip says without -q
        return "pip excludes it: a requirement, or a constraint (pip config get global.constraint)"
    return lines[-1].strip()[:200] if lines else f"{error.cmd[0]} failed"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="HOST-VERSION")
    parser.add_argument("--base", default=sys.executable, help="the interpreter to build on")
    add_csv(parser, RESULTS.stem)
    parser.add_argument("--logs", type=Path, help="a folder for the tests' output")
    parser.add_argument("--docs", action="store_true", help="write the table into docs and exit")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        print("\n".join(PARTS))
        return
    if chosen.docs:
        write_docs()
        return
    parts = [p for part in chosen.parts for p in (NEWEST if part == "newest" else [part])]
    for part in parts:
        parse(part)
    failed = False
    for part in parts:
        row = run_part(part, chosen.base, chosen.logs)
        if row["result"] != _NONE_NEWER:
            write([row], chosen.csv)
            failed |= row["result"] != "works"
        print(f"{part}: {row['result']} ({row.get('passed', 0)} passed) {row['note']}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
