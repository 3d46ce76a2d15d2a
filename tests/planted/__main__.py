"""Plants faults in a copy of the repository, one at a time, and runs the tests beside each.

    python -m tests.planted                    all rooms
    python -m tests.planted tensor optim       these rooms
    python -m tests.planted tensor -k stale    faults whose name contains a word

The copy is installed in an environment of its own, because the processes that some tests start
import the installed package. Tests that fail without a fault are reported first. Exit status 1: a
fault was missed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.planted import FAULTS
from tests.planted.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
"""A test that a fault makes hang has noticed it."""


def copy_repository(folder: Path) -> Path:
    """Copy the tracked and new files, and return the copy's root."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    root = folder / "repository"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    return root


def install(folder: Path, root: Path) -> Path:
    """Make an environment that imports the copy, and everything else from this one.

    Returns:
        Path of its Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    scripts, here = folder / "venv/bin", Path(sys.executable).parent
    python = scripts / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "venv/lib" / version / "site-packages"
    (site / "copy.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    for script in here.iterdir():
        if not script.is_file() or script.is_symlink() or (scripts / script.name).exists():
            continue
        content = script.read_bytes()
        if content.startswith(f"#!{here}/python".encode()):
            content = content.replace(f"{here}/".encode(), f"{scripts}/".encode(), 1)
            (scripts / script.name).write_bytes(content)
            (scripts / script.name).chmod(0o755)
    return python


def run_tests(python: Path, root: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests until one fails.

    Returns:
        pytest's exit status, or 1 after `SECONDS`; the first failure.
    """
    command = [
        python,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "--tb=no",
        "-p",
        "no:cacheprovider",
    ]
    try:
        result = subprocess.run(
            [*command, "-m", "not gpu and not slow", *tests],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # waiting threads take processor time
        )
    except subprocess.TimeoutExpired:
        return 1, f"more than {SECONDS} s"
    lines = [x for x in result.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return result.returncode, lines[0] if lines else result.stdout[-300:]


def seen(python: Path, root: Path, faults: list[Fault]) -> Iterator[tuple[Fault, int, str]]:
    """Plant each fault, run its tests, and put the file back."""
    for fault in faults:
        path = root / fault.file
        source = path.read_text()
        path.write_text(source.replace(fault.right, fault.wrong))
        try:
            status, failure = run_tests(python, root, fault.tests.split())
        finally:
            path.write_text(source)
        yield fault, status, failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("rooms", nargs="*", choices=[[], *FAULTS], help="default: all")
    parser.add_argument("-k", dest="word", default="", help="faults whose name contains this")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without faults")
    options = parser.parse_args()
    rooms = options.rooms or list(FAULTS)
    faults = [fault for room in rooms for fault in FAULTS[room] if options.word in fault.name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = copy_repository(folder)
        python = install(folder, root)
        if not options.trust:
            tests = sorted({test for fault in faults for test in fault.tests.split()})
            status, failure = run_tests(python, root, tests)
            if status:
                print(f"without a fault: {failure}")
                return 1
        missed = 0
        for fault, status, failure in seen(python, root, faults):
            missed += status == 0
            print("MISSED" if status == 0 else "seen  ", fault.name, "|", failure, flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults were seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
