"""A warning if FP8 was requested outside a script, and the script trains without it.

A launcher's flag can get lost in many ways: an argument of the script overrides it, a version of a
host could not be extended, or the script never prepares the model. None of them may be silent. So
this module depends on none of our extensions: `_fp8_autoload` calls `install` if the environment
requests FP8, and one of torch's own hooks checks, at the first step of any optimizer, whether the
process has a single FP8 layer. If not, one warning on rank zero gives the reason and a solution.

Another backend's FP8 layers count as well, because they also fulfil the request.
"""

import functools
import gc
import logging
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import _fp8_autoload

CONFIG_VARIABLE = "TORCH_FP8_CONFIG"
_LAUNCHER = "ACCELERATE_MIXED_PRECISION"
_BACKEND = "ACCELERATE_FP8_BACKEND"
_NOTEBOOK = "MIXED_PRECISION"

# Modules that define FP8 layers: ours and those of Accelerate's other backends.
_FP8_LAYERS = ("torch_fp8.", "transformer_engine.", "torchao.float8.", "msamp.")
_HOSTS = {
    "accelerate": ("accelerate", "transformers", "trl"),
    "lightning": ("lightning", "lightning_fabric", "pytorch_lightning"),
}


@functools.cache
def install() -> None:
    """Check once, at the first step of an optimizer; a second call changes nothing."""
    import_module("torch.optim.optimizer").register_optimizer_step_pre_hook(_FirstStep())


class _FirstStep:
    """The hook for the first step. It stays, because torch iterates over its hooks."""

    looked = False

    def __init__(self) -> None:
        self.asked = _asked_by()

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.looked or sys.modules["torch"].compiler.is_compiling():
            return
        self.looked = True
        # transformers 4 overwrites the launcher's variable.
        message = complaint(_asked_by() or self.asked)
        if message is not None and _is_rank_zero():
            logging.getLogger("torch_fp8").warning(message)


def complaint(asked: tuple[str, str] | None) -> str | None:
    """Explain why requested FP8 does not run, with a solution, or return None if it runs.

    Args:
        asked: the result of `_asked_by`.
    """
    if asked is None or _has_fp8_layer() or _was_told():
        return None
    text, host = asked
    return f"FP8 was requested by {text}, but this process trains without any FP8 layer: " + (
        _failed_extension(host) or (_why_accelerate if host == "accelerate" else _why_lightning)()
        if host
        else f"{CONFIG_VARIABLE} sets how FP8 runs, but does not turn it on. Turn it on with "
        "accelerate launch --mixed_precision fp8, with Lightning's precision='fp8-mixed', or "
        "call torch_fp8.convert_to_float8(model)"
    )


def _asked_by() -> tuple[str, str] | None:
    """Return what requested FP8, and for which host ("" for none in particular)."""
    if os.environ.get(_LAUNCHER, "").lower() == "fp8":
        return f"accelerate launch --mixed_precision fp8 ({_LAUNCHER})", "accelerate"
    if os.environ.get(_NOTEBOOK, "").lower() == "fp8":
        return f"notebook_launcher(mixed_precision='fp8') ({_NOTEBOOK})", "accelerate"
    for name, value in os.environ.items():
        of_lightning = name.startswith(("PL_", "LT_")) and name.endswith("_PRECISION")
        if of_lightning and value.lower().startswith("fp8"):
            return f"{name}={value}", "lightning"
    if _accelerator_precision() == "fp8":
        return "Accelerator(mixed_precision='fp8')", "accelerate"
    return (CONFIG_VARIABLE, "") if os.environ.get(CONFIG_VARIABLE) else None


def _has_fp8_layer() -> bool:
    if gc.get_freeze_count() and "torch_fp8.nn.linear" in sys.modules:
        return True  # gc.freeze() hides objects, but the engine was used
    module = sys.modules["torch"].nn.Module
    return any(
        issubclass(kind, module)
        and any(f"{base.__module__}.".startswith(_FP8_LAYERS) for base in kind.__mro__)
        for kind in set(map(type, gc.get_objects()))
    )


def _was_told() -> bool:
    """Return whether a summary already explained that a converted model has no FP8 layer."""
    return any(
        type(thing).__name__ == "ConversionReport"
        and type(thing).__module__.startswith("torch_fp8.")
        and not thing.converted
        for thing in gc.get_objects()
    )


def _failed_extension(host: str) -> str | None:
    """Return what `_fp8_autoload` knows of the host's modules that could not be extended."""
    for name, status in _fp8_autoload._finder.status.items():
        package = name.partition(".")[0]
        if package not in _HOSTS[host] or name not in sys.modules or status == "extended":
            continue
        if status == "waiting":
            return (
                f"{name} was imported without going through torch-fp8's finder in sys.meta_path. "
                f"Write `import {host}_fp8` after the other imports of the script"
            )
        return (
            f"{name} of {package} {sys.modules[package].__version__} could not be extended "
            f"({status}). Install a version listed in the README, or call "
            "torch_fp8.convert_to_float8(model)"
        )
    return None


def _why_accelerate() -> str:
    precision = _accelerator_precision()
    backend = os.environ.get(_BACKEND, "NO").lower()
    if precision is None:
        return (
            "it has no Accelerator, which is what the flag applies to. Prepare the model with one, "
            "or call torch_fp8.convert_to_float8(model)"
        )
    launched = os.environ.get(_LAUNCHER, "no").lower()
    if precision != "fp8" and launched == "no" and _NOTEBOOK in os.environ:
        return (
            f"its Accelerator has mixed_precision={precision!r}, because Accelerate does not read "
            f"the variable {_NOTEBOOK} that its notebook_launcher sets. Write "
            "Accelerator(mixed_precision='fp8') in the function you launch"
        )
    if precision != "fp8":
        return (
            f"its Accelerator was made with mixed_precision={precision!r}, from an argument in the "
            "script (Accelerator(mixed_precision=...), or fp16=True in TrainingArguments), which "
            "overrides the launcher. Leave that argument out, or pass 'fp8' there"
        )
    if backend not in ("", "no", "torch_fp8"):
        return (
            f"--fp8_backend {backend} was chosen, but converted nothing. Leave it out to run the "
            "engine torch_fp8"
        )
    return (
        "no model with linear layers was passed to Accelerator.prepare before the first step. "
        "Prepare the model you train"
    )


def _why_lightning() -> str:
    for loop in _loops_of_lightning():
        name = type(loop).__name__
        precision = getattr(loop, "precision", None) or loop._precision.precision
        if precision == "fp8-mixed":
            return (
                f"its {name} set up no model with linear layers before the first step. Let it set "
                "up the model you train"
            )
        return (
            f"its {name} runs precision={precision!r}, from an argument in the script or its "
            "configuration, which overrides the environment. Leave it out, or pass 'fp8-mixed' "
            "there"
        )
    return (
        "it has neither a Trainer nor a Fabric, which are what the variable applies to. Use one, "
        "or call torch_fp8.convert_to_float8(model)"
    )


def _loops_of_lightning() -> Iterator[Any]:
    for candidate in gc.get_objects():
        for base in type(candidate).__mro__:
            of_lightning = f"{base.__module__}".partition(".")[0] in _HOSTS["lightning"]
            if of_lightning and base.__name__ in ("Trainer", "Fabric"):
                yield candidate


def _accelerator_precision() -> str | None:
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    precision = getattr(state, "_shared_state", {}).get("_mixed_precision")
    return None if precision is None else str(precision)


def _is_rank_zero() -> bool:
    distributed = sys.modules["torch"].distributed
    if distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"
