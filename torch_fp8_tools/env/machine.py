"""``torch-fp8 env``: describe and test what a machine and its software have for FP8 training."""

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import torch_fp8
from torch_fp8._version import distribution_version
from torch_fp8.checkpoint.whole_folder import whole_file
from torch_fp8.ops.hardware import PACKAGES, check_driver, missing_tools
from torch_fp8_tools.env.cards import cards
from torch_fp8_tools.env.hosts import autoload, hosts
from torch_fp8_tools.env.result import (
    FAILED,
    INFO,
    MORE,
    Result,
    last_line,
    lines,
    paragraphs,
    report_text,
    summary,
)
from torch_fp8_tools.env.smoke import SUBJECTS, smoke

INTERRUPTED = 130
"""The exit status of a command that was interrupted."""


def describe(options: argparse.Namespace) -> int:
    """Describe this machine, and run the self-test if requested; returns the exit status."""
    if options.only and not options.self_test:
        options.parser.error("--only chooses subjects of --self-test")
    report = _report_path(options)
    subjects = (options.only or SUBJECTS) if options.self_test else ()
    described: list[Result] = []
    tested: list[Result] = []
    interrupted = False
    try:
        of_hosts = () if options.only else (autoload, hosts)
        for describe in (versions, cards, *of_hosts):
            if describe is hosts:  # the imports of all hosts can take a minute
                print("importing each installed host in a process of its own", file=sys.stderr)
            part = _guarded(describe)
            _show(part, options)
            described += part
        for result in smoke(subjects) if subjects else ():
            tested.append(result)
            counter = f"[{len(tested)}/{len(subjects)}]"
            print(counter, result.name, result.status, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted, report = True, None
    _show(tested, options)
    results = described + tested
    status = int(any(result.status == FAILED for result in results))
    if report is not None:
        text = report_text(results, shlex.join(["torch-fp8", *sys.argv[1:]]))
        with whole_file(report) as partial:
            partial.write_text(text, encoding="utf-8", errors="replace")
    if options.json:
        fields = [asdict(result) for result in results]
        listed = [{key: v for key, v in of.items() if key != "part"} for of in fields]
        path = None if report is None else str(report)
        end = json.dumps({"ok": not status, "report": path, "results": listed}, indent=2)
    else:
        end = summary(results)
        end += "" if options.all or options.self_test else MORE
        end += "" if report is None else f"\nreport: {report}"
    _print(f"{end}\n")
    if interrupted:
        print("interrupted: the rest did not run, and no report was written", file=sys.stderr)
    return INTERRUPTED if interrupted else status


def _guarded(describe: Callable[[], list[Result]]) -> list[Result]:
    """Describe a part of the machine; if that fails, the failure is the result."""
    try:
        return describe()
    except Exception as error:
        name = getattr(describe, "__name__", "machine")
        return [Result(name, name, FAILED, last_line(error), log=traceback.format_exc())]


def _show(results: Sequence[Result], options: argparse.Namespace) -> None:
    """Print sections as soon as they are known; JSON is printed at the end, as one object."""
    if results and not options.json:
        is_long = options.all or options.self_test
        width = shutil.get_terminal_size((100 if is_long else 80, 24)).columns
        _print((lines if is_long else paragraphs)(results, width))


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: `torch-fp8 env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_path(options: argparse.Namespace) -> Path | None:
    """Return the report's path or None; raise at once if its folder is not writable."""
    path: Path | None = options.report
    if path is not None:
        path = path.absolute()
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            options.parser.error(f"--report {options.report}: this file cannot be written")
        return path
    if not options.self_test:
        return None
    current = Path.cwd()
    folder = current if os.access(current, os.W_OK) else Path(tempfile.gettempdir())
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return folder / f"torch-fp8-env-{now}.txt"


SECTION = "versions"
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> list[Result]:
    """List the versions of this package, Python, torch and the libraries that torch depends on."""
    known = {
        "torch-fp8": f"{torch_fp8.__version__} in {Path(torch_fp8.__file__).parent}",
        "Python": f"{platform.python_version()} at {sys.executable}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": torch.__version__,
        "CUDA": _cuda(),
        "driver": driver() or "none",
        "cuBLASLt": _cublas(),
        "NCCL": _nccl(),
        "Triton": distribution_version("triton") or "not installed: no kernel can run on a card",
    }
    rows = [Result(SECTION, name, INFO, detail) for name, detail in known.items()]
    return [*rows, _compiler()]


def driver() -> str | None:
    """Return the version of the NVIDIA driver, None if there is none."""
    if _DRIVER.is_file():
        words = _DRIVER.read_text().partition("\n")[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else None


def _compiler() -> Result:
    """Report Triton's compiler; it fails only if the first kernel on a GPU would fail."""
    try:
        if torch.cuda.is_available():
            check_driver(torch.device("cuda"))
    except (ImportError, ValueError) as error:
        return Result(SECTION, "C compiler", FAILED, " ".join(str(error).split()))
    missing = ", and ".join(missing_tools())
    needed = f"{missing}. A GPU needs them, or a warm Triton cache: apt-get install {PACKAGES}"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return Result(SECTION, "C compiler", INFO, needed if missing else f"{compiler}, with Python.h")


def _cuda() -> str:
    if torch.version.hip is not None:
        return f"none: torch was built for ROCm {torch.version.hip}"
    return torch.version.cuda or "none: torch was built for the CPU"


def _cublas() -> str:
    if torch.version.cuda is None:
        return "none"
    version = distribution_version(*_CUBLAS)
    return version or "included with CUDA; torch does not report its version"


def _nccl() -> str:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))
