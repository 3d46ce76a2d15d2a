"""The GPUs of this machine, and the recipes that run natively on each."""

import os
import warnings

import torch

from torch_fp8.ops.hardware import reason_not_native
from torch_fp8.quantization.formats import MIN_CAPABILITY
from torch_fp8.quantization.recipe import RECIPES
from torch_fp8_tools.env.result import INFO, OK, Result, last_line, one_line

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
