"""A check that kernels can start: Triton compiles a C module on first use."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from torch_fp8.quantization.formats import MIN_CAPABILITY

PACKAGES = "build-essential python{}.{}-dev".format(*sys.version_info)
"""The packages of Debian and Ubuntu with the tools that Triton needs to compile."""


def check_driver(device: torch.device) -> None:
    """Start Triton's driver if kernels run on `device`, as the first kernel would.

    With a warm cache the driver needs no compiler.

    Raises:
        ImportError: Triton is not installed.
        ValueError: the driver does not start; the message names the packages to install.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return  # no kernels: the reference runs
    try:
        from torch_fp8.kernels.quick_launch import start_driver
    except ModuleNotFoundError as error:
        raise ImportError(f"FP8's kernels need Triton ({error}): pip install triton") from error
    try:
        start_driver()
    except Exception as error:
        raise ValueError(f"FP8 cannot run on this GPU: {_reason(error)}") from error


def missing_tools() -> list[str]:
    """Return the missing tools for Triton's compilation: C compiler, Python header."""
    missing = []
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        missing.append(f"CC={compiler!r} names no program")
    elif compiler is None and not (shutil.which("gcc") or shutil.which("clang")):
        missing.append("there is no C compiler (gcc, clang, or what CC names)")
    folders = [_include_folder()]
    for variable in ("CPATH", "C_INCLUDE_PATH"):
        folders += os.environ.get(variable, "").split(os.pathsep)
    if not any(folder and Path(folder, "Python.h").is_file() for folder in folders):
        missing.append(f"there is no Python.h in {folders[0]}")
    return missing


def _include_folder() -> str:
    scheme = sysconfig.get_default_scheme()
    # Debian's Python defaults to the scheme of local packages; Triton does not use it.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _reason(error: Exception) -> str:
    missing = missing_tools()
    if missing or isinstance(error, subprocess.CalledProcessError):
        why = ", and ".join(missing) or f"the compiler failed ({error})"
        return (
            f"Triton compiles a C module on first use, and {why}. Install them: apt-get install "
            f"{PACKAGES} (Debian, Ubuntu), dnf install gcc python3-devel (Fedora, RHEL); or set CC "
            "to another C compiler"
        )
    text = f"{type(error).__name__}: {error}".strip()
    return (
        f"Triton's driver does not start ({text}). It needs libcuda.so.1 of the NVIDIA driver "
        "(TRITON_LIBCUDA_PATH names its folder) and a folder to write to and to execute from "
        "(TRITON_CACHE_DIR names it)"
    )
