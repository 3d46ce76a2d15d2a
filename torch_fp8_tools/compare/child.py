"""The part of a comparison in the user's program: `_fp8_autoload` calls `install` if the
environment variable ``TORCH_FP8_COMPARE`` names a trial.

It imports only torch and the standard library, because it runs at the end of ``import torch``.
"""

import contextlib
import functools
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from torch_fp8_tools.compare.trial import EXCEPTION, PROCESSES, VARIABLE, read_trial

_HOSTS, _OUTPUTS = "torch_fp8_tools.compare.host_precision", "torch_fp8_tools.compare.redirection"
EXTENSIONS = {
    **dict.fromkeys(
        (
            *("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
            *("lightning.fabric.fabric", "lightning_fabric.fabric"),
        ),
        (f"{_HOSTS}:extend_lightning", f"{_OUTPUTS}:extend_lightning"),
    ),
    "accelerate.accelerator": (f"{_HOSTS}:extend_accelerator", f"{_OUTPUTS}:extend_accelerator"),
    "transformers.training_args": (
        f"{_HOSTS}:extend_arguments",
        f"{_OUTPUTS}:extend_arguments",
    ),
    "torch_fp8.config": (f"{_HOSTS}:extend_config",),
    "torch_fp8.conversion.convert": (f"{_HOSTS}:extend_conversion",),
    "transformers.trainer": (f"{_OUTPUTS}:extend_trainer",),
    **dict.fromkeys(
        (
            *("transformers.modeling_utils", "transformers.tokenization_utils_base"),
            *("transformers.configuration_utils", "transformers.processing_utils"),
            *("transformers.feature_extraction_utils", "peft.peft_model"),
            *("transformers.utils.hub", "huggingface_hub.hf_api", "safetensors.torch"),
        ),
        (f"{_OUTPUTS}:extend_saving",),
    ),
    **dict.fromkeys(
        (
            "lightning.pytorch.loops.evaluation_loop",
            "pytorch_lightning.loops.evaluation_loop",
        ),
        ("torch_fp8_tools.compare.host_precision:extend_evaluation_loop",),
    ),
}
"""The functions that extend each module of a host, in addition to those of `_fp8_autoload`."""
_installed: list[Any] = []


def install(finder: Any) -> None:
    """Record this process; a second call changes nothing.

    Args:
        finder: the finder of `_fp8_autoload`, which extends the hosts when they are imported.
    """
    if _installed:
        return
    from torch_fp8_tools.compare.recorder import Recorder

    trial = read_trial(os.environ[VARIABLE])
    _installed.append(Recorder(trial))
    with (Path(trial.folder) / PROCESSES).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {' '.join(sys.argv[:2])}\n")
    say(f"{'BF16' if trial.is_bf16 else 'FP8'} trial {trial.variant!r}, {trial.steps} steps")
    _keep_exception(Path(trial.folder) / EXCEPTION)
    _seed(trial.seed)
    if os.environ.pop("LT_PRECISION", None):
        say("fabric run --precision is left out")
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if trial.is_bf16 else "fp8"
    if trial.fast_cpu:
        from torch_fp8_tools.compare.bf16_products import compute_in_float32

        compute_in_float32()
        note("BF16 products are computed in float32 and rounded once")
    from torch_fp8_tools.compare import redirection

    redirection.begin(trial)
    for module, functions in EXTENSIONS.items():
        for function in functions:
            finder.add(module, function)
    finder.extend_imported()


def recorder() -> Any:
    """Return the recorder of this process."""
    return _installed[0]


def say(message: str) -> None:
    """Write a line to the log of the trial; every override leaves one there."""
    print(f"torch-fp8 compare: {message}", file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Write a line to the log, and to the record, which the report shows."""
    if message not in recorder().notes:
        say(message)
        recorder().note(message)


def wrap(holder: Any, name: str, function: Any) -> None:
    """Replace ``holder.name``, if it exists, by ``function(original, *args, **kwargs)``, once.

    Copies of a function in modules of these packages are replaced as well.
    """
    original = vars(holder).get(name)
    place = f"{function.__module__}.{function.__qualname__}"
    if original is None or place in getattr(original, "compare_places", ()):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    known = getattr(original, "compare_places", ())
    wrapper.compare_places = (*known, place)  # type: ignore[attr-defined]
    setattr(holder, name, wrapper)
    if isinstance(holder, type):
        return
    for module in list(sys.modules.values()):
        package = getattr(module, "__name__", "").partition(".")[0]
        is_ours = package in ("torch_fp8", "lightning_fp8", "accelerate_fp8", "safetensors")
        if is_ours and vars(module).get(name) is original:
            vars(module)[name] = wrapper


def _keep_exception(path: Path) -> None:
    """Write the first exception that ends a process of the trial: launchers log their own last."""
    original = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(kind, error, trace))
        original(kind, error, trace)

    sys.excepthook = hook


def _seed(number: int) -> None:
    """Seed the generators for a program that doesn't, and shift the seeds of one that does.

    The trials of one number begin with the same weights and read the data in the same order. With
    number 0 a program's own seeds stay as they are.
    """
    shift = 1_000_003 * number
    torch.manual_seed(shift)
    random.seed(shift)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(shift)
    if not number:
        return

    def shifted(original: Any, seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = (seed + shift) % 2**32 if isinstance(seed, int) else seed
        return original(given, *args, **kwargs)

    for holder, name in ((torch, "manual_seed"), (torch.random, "manual_seed")):
        wrap(holder, name, shifted)
    for module in filter(None, (random, getattr(numpy, "random", None))):
        module.seed = (lambda original: lambda *a, **k: shifted(original, *a, **k))(module.seed)
