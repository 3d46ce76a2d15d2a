"""Whether FP8 is requested, and wrappers of hosts' functions that import nothing of the engine.

This module imports only the standard library; see `accelerate_fp8._register`.
"""

import os
import sys
from importlib import import_module
from typing import Any

_BACKEND_VARIABLE, ENGINE = "ACCELERATE_FP8_BACKEND", "TORCH_FP8"


def asks_for_fp8(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments or the launcher request this engine's FP8."""
    handlers = kwargs.get("kwargs_handlers") or ()
    theirs = any(type(handler).__name__.endswith("RecipeKwargs") for handler in handlers)
    theirs = theirs or os.environ.get(_BACKEND_VARIABLE, "") not in ("", ENGINE)
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, str)]
    asked = launched_with_fp8() or any(value.lower() == "fp8" for value in given)
    return asked and not theirs


def may_use_engine(accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return False if FP8 is certainly not requested, so that a BF16 run imports nothing of ours.

    Args:
        accelerator: the object whose method is called, possibly before its ``__init__``.
        args: the positional arguments of the method.
        kwargs: the keyword arguments of the method.
    """
    if "state" in accelerator.__dict__:  # constructed
        return "_fp8_preparation" in accelerator.__dict__
    state = sys.modules["accelerate.state"]
    running = state.AcceleratorState().mixed_precision if state.is_initialized() else None
    precisions = [*args, *kwargs.values(), running]
    return (
        "accelerate_fp8.handler" in sys.modules
        or any(isinstance(p, str) and p.lower().startswith("fp8") for p in precisions)
        or os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower().startswith("fp8")
    )


def launched_with_fp8() -> bool:
    """Return whether the launcher requested FP8."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8"


def is_fp8_available(original: Any) -> bool:
    """Replace Accelerate's function: FP8 no longer needs one of its optional libraries.

    The launcher and AcceleratorState call it before they accept the flag. If the user chooses a
    library explicitly and it is missing, its recipe handler still refuses it.
    """
    return True


def check_cuda_fp8_capability(original: Any) -> bool:
    """Extend Accelerate's function for AcceleratorState: no silent FP16 on older cards."""
    return bool(import_module("accelerate_fp8.backend").PRECISION_KEPT.get() or original())


def init_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend ``AcceleratorState.__init__``: read the environment again.

    `notebook_launcher` requests FP8 there long after torch was imported.
    """
    import_module("_fp8_autoload").load("accelerate_fp8")
    original(self, *args, **kwargs)


def ask_backend(
    original: Any, question: str, options: Any, convert_value: Any, default: int = 0
) -> Any:
    """Extend the menu of ``accelerate config``: list this engine first among the FP8 backends."""
    choice = original(question, [ENGINE.lower(), *options], None, default)
    return convert_value(choice - 1) if choice else ENGINE
