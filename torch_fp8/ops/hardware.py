"""Which recipes a device can run, and the error for a device that cannot run one."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from torch_fp8.quantization.formats import MIN_CAPABILITY
from torch_fp8.quantization.payload_shape import GRANULARITIES
from torch_fp8.quantization.recipe import RECIPES, make_recipe

_MIN_CUDA_OF_BLOCKS = (12, 9)
UNMEASURED = "tensorwise"
"""Recipe of ``auto`` if nothing is measured, on every device.

Published measurements on Hopper show it as the fastest recipe that uses the current tensor's scale,
and the CPU uses what Hopper does. If a measurement on another architecture differs, it belongs
here.
"""


def check_device(device: torch.device, recipe_name: str, emulate: bool) -> None:
    """Raise ValueError if `device` cannot run the recipe and emulation was not requested."""
    if device.type in ("cpu", "meta"):
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(
            "FP8 runs on NVIDIA GPUs of compute capability 8.9 and above, and emulated on the CPU; "
            f"this device is {device.type!r}. Use BF16 mixed precision here"
        )
    if emulate:
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    check_card(name, capability, recipe_name, _cuda_version())


def check_card(
    name: str,
    capability: tuple[int, int],
    recipe_name: str,
    cuda: tuple[int, ...] = _MIN_CUDA_OF_BLOCKS,
) -> None:
    """Raise ValueError if a GPU of this compute capability, which need not be present, cannot run
    the recipe with a version of CUDA.
    """
    card = f"{name} (sm_{capability[0]}{capability[1]})"
    if capability < MIN_CAPABILITY:
        raise ValueError(
            f"{card} has no FP8 tensor cores: they come with sm_89 (Ada), sm_90 (Hopper) "
            "and later. Use BF16 mixed precision on this card, or FP8Config(emulate=True) to try "
            "out the numerics, slowly"
        )

    reason = _unsupported(recipe_name, capability, card, cuda)
    if reason is not None:
        runs = [recipe for recipe in RECIPES if not _unsupported(recipe, capability, card, cuda)]
        raise ValueError(
            f"recipe {recipe_name!r}: {reason}. It runs {', '.join(runs)}; "
            "choose one of these, recipe='auto', or FP8Config(emulate=True)"
        )


def runs_natively(device: torch.device, recipe_name: str) -> bool:
    """Return whether `device` runs all GEMMs of the recipe on FP8 tensor cores."""
    return device.type == "cuda" and reason_not_native(device, recipe_name) is None


def backend_name(device: torch.device, emulated: bool) -> str:
    """Describe in one line what runs the GEMMs, for the start-up summary."""
    if device.type != "cuda":
        return f"emulation on {device.type.upper() if device.type == 'cpu' else device.type}"
    return f"{'emulation' if emulated else 'torch scaled_mm'} on {card_name(device)}"


def card_name(device: torch.device) -> str:
    """Return the name of a CUDA device with its compute capability; ``the CPU`` for others."""
    if device.type != "cuda":
        return "the CPU"
    capability = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"


def reason_not_native(device: torch.device, name: str) -> str | None:
    """Return why `device` cannot run the GEMMs of the recipe, or None if it can."""
    capability = torch.cuda.get_device_capability(device)
    return _unsupported(name, capability, card_name(device), _cuda_version())


def _unsupported(
    name: str, capability: tuple[int, int], card: str, cuda: tuple[int, ...]
) -> str | None:
    """Return why a GPU of this capability cannot run the GEMMs of the recipe, or None if it can."""
    recipe = make_recipe(name)
    for cast in (recipe.input, recipe.weight, recipe.grad_output):
        least, most = GRANULARITIES[cast.granularity].cards
        if not least <= capability <= most:
            return f"{card} cannot run {cast.granularity} GEMMs"
        if cast.granularity.startswith("block_") and cuda < _MIN_CUDA_OF_BLOCKS:
            return (
                f"{cast.granularity} GEMMs need CUDA 12.9, this torch was built with "
                f"{torch.version.cuda}"
            )
    return None


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(action: str, instead: str) -> None:
    """Raise RuntimeError if a CUDA graph is being captured.

    Args:
        action: work for which the host chooses numbers, such as keys of random bits.
        instead: way out for the user.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{action} cannot be captured in a CUDA graph, because each replay would repeat the "
            f"numbers of the captured step: learning rate, bias corrections, random bits; {instead}"
        )


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
    scheme = sysconfig.get_default_scheme()
    # Debian's Python defaults to the scheme of local packages; Triton does not use it.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    folders = [sysconfig.get_paths(scheme)["include"]]
    for variable in ("CPATH", "C_INCLUDE_PATH"):
        folders += os.environ.get(variable, "").split(os.pathsep)
    if not any(folder and Path(folder, "Python.h").is_file() for folder in folders):
        missing.append(f"there is no Python.h in {folders[0]}")
    return missing


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
