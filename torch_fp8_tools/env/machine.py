"""``torch-fp8 env``: describe and test what a machine and its software have for FP8 training.

This module describes versions and GPUs, with the recipes that run natively on each GPU.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils import collect_env

import torch_fp8
from torch_fp8._version import distribution_version
from torch_fp8.ops.hardware import PACKAGES, check_driver, missing_tools, reason_not_native
from torch_fp8.quantization.formats import MIN_CAPABILITY
from torch_fp8.quantization.recipe import RECIPES
from torch_fp8_tools.env.hosts import autoload, hosts
from torch_fp8_tools.env.result import (
    FAILED,
    INFO,
    OK,
    SUBJECTS,
    Result,
    last_line,
    lines,
    one_line,
    summary,
)
from torch_fp8_tools.env.smoke import smoke

_MORE = "\ntorch-fp8 env --all prints every line; --self-test tries everything"
"""The end of a brief description."""


def describe(options: argparse.Namespace) -> int:
    """Describe this machine, and run the self-test if requested; returns the exit status."""
    if options.only and not options.self_test:
        options.parser.error("--only chooses subjects of --self-test")
    subjects = (options.only or SUBJECTS) if options.self_test else ()
    results: list[Result] = []
    for describe in (versions, cards, *(() if options.only else (autoload, hosts))):
        if describe is hosts:  # the imports of all hosts can take a minute
            print("importing each installed host in a process of its own", file=sys.stderr)
        try:
            part = describe()
        except Exception as error:
            name, log = getattr(describe, "__name__", "machine"), traceback.format_exc()
            part = [Result(name, name, FAILED, last_line(error), log=log)]
        _show(part, options)
        results += part
    tested: list[Result] = []
    for result in smoke(subjects) if subjects else ():
        tested.append(result)
        counter = f"[{len(tested)}/{len(subjects)}]"
        print(counter, result.name, result.status, file=sys.stderr, flush=True)
    _show(tested, options)
    results += tested
    status = int(any(result.status == FAILED for result in results))
    if options.json:
        listed = [asdict(result) for result in results]
        end = json.dumps({"ok": not status, "results": listed}, indent=2)
    else:
        logs = [f"{r.section}: {r.name}\n{r.log}" for r in results if r.log and r.status == FAILED]
        end = "\n\n".join([*logs, summary(results)])
        end += "" if options.all or options.self_test else _MORE
    _print(f"{end}\n")
    return status


def _show(results: Sequence[Result], options: argparse.Namespace) -> None:
    """Print sections as soon as they are known; JSON is printed at the end, as one object."""
    shown = [result for result in results if options.all or not result.part]
    if not options.json:
        _print(lines(shown, shutil.get_terminal_size((100, 24)).columns))


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: `torch-fp8 env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


SECTION = "versions"
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")


def versions() -> list[Result]:
    """List the versions of this package, Python, torch and the libraries that torch depends on."""
    built_for = f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"
    cublas = (
        distribution_version(*_CUBLAS) or "included with CUDA; torch does not report its version"
    )
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    known = {
        "torch-fp8": f"{torch_fp8.__version__} in {Path(torch_fp8.__file__).parent}",
        "Python": f"{platform.python_version()} at {sys.executable}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or f"none: torch was built for {built_for}",
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) or "none",
        "cuBLASLt": cublas if torch.version.cuda else "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        "Triton": distribution_version("triton") or "not installed: no kernel can run on a card",
    }
    return [*(Result(SECTION, name, INFO, text) for name, text in known.items()), _compiler()]


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


CARDS, NATIVE = "cards", "recipes on cards"
EMULATION = (
    "in emulation: the same rounding and states, multiplied in float32, which is slower than BF16 "
    "on a CPU with fast BF16 products"
)


def cards() -> list[Result]:
    """Describe each GPU: compute capability, memory, and what is missing for each recipe."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        why = _no_card([one_line(str(warning.message)) for warning in said])
        cpu = f"every recipe runs {EMULATION}. Use it for trials, not for training"
        return [Result(CARDS, "none", INFO, why), Result(NATIVE, "CPU", INFO, cpu)]
    results = []
    for index in range(count):
        try:
            results += _card(torch.device("cuda", index))
        except Exception as error:  # for example a GPU that has fallen off the bus
            results.append(Result(CARDS, f"cuda:{index}", "failed", last_line(error)))
    return results


def usable_device(name: str) -> torch.device:
    """Return the device for a command's ``--device``.

    Args:
        name: the value of the option.
    Raises:
        ValueError: the device does not exist here; the message gives the reason and an alternative.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: not a torch device; use cpu, cuda or cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        reason = _no_card([]) if not torch.cuda.device_count() else "there is no such card here"
        raise ValueError(f"--device {name}: {reason}. Use --device cpu, the default")
    return device


def _card(device: torch.device) -> list[Result]:
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    memory = properties.total_memory / 2**30
    detail = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.1f} GiB"
    results = [Result(CARDS, str(device), INFO, detail)]
    if capability < MIN_CAPABILITY:
        detail = (
            "no FP8 tensor cores, which come with sm_89 (Ada), sm_90 (Hopper) and later: use BF16 "
            f"on this card. FP8Config(emulate=True) runs every recipe {EMULATION}"
        )
        return [*results, Result(NATIVE, str(device), INFO, detail)]
    for recipe in RECIPES:
        reason = reason_not_native(device, recipe)
        runs = (OK, "native") if reason is None else (INFO, f"not native: {reason}")
        results.append(Result(NATIVE, f"{device} {recipe}", *runs))
    return results


def _no_card(said: list[str]) -> str:
    if torch.version.hip is not None:
        return "torch was built for ROCm: FP8 runs on NVIDIA cards of sm_89 and above"
    if torch.version.cuda is None:
        return "this torch was built for the CPU; install the CUDA build to use cards"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides all of them"
    return "; ".join(["torch finds none", *said])
