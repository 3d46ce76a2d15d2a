"""Versions of the software that FP8 depends on."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import torch_fp8
from torch_fp8._version import distribution_version
from torch_fp8.ops.kernel_driver import PACKAGES, check_driver, missing_tools
from torch_fp8_tools.env.result import FAILED, INFO, Result

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
