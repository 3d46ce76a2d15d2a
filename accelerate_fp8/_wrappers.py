"""Wrappers of hosts' methods that import the engine only if FP8 may be requested.

This module imports only the standard library; see `accelerate_fp8._register`.
"""

import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from _fp8_points import wrapped

_BACKEND_VARIABLE, ENGINE = "ACCELERATE_FP8_BACKEND", "TORCH_FP8"


def too_old(host: str) -> str | None:
    """Return the refusal of a host that is too old; None if it is supported."""
    line: str | None = import_module("accelerate_fp8._versions").refusal(host)
    return line


def refuse_when_asked(cls: type, name: str, line: str, asked: Callable[..., bool]) -> None:
    """Make a method of a host that is too old raise `line` if this engine's FP8 is requested."""
    original = getattr(cls, name)
    if hasattr(original, "_fp8_original"):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        handlers = kwargs.get("kwargs_handlers") or ()
        theirs = any(type(handler).__name__.endswith("RecipeKwargs") for handler in handlers)
        theirs = theirs or os.environ.get(_BACKEND_VARIABLE, "") not in ("", ENGINE)
        if not theirs and asked(self, args, kwargs):
            raise ImportError(line)
        return original(self, *args, **kwargs)

    wrapper._fp8_original = original  # type: ignore[attr-defined]
    setattr(cls, name, wrapper)


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


def asks_for_fp8(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments or the launcher request FP8."""
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, str)]
    return launched_with_fp8() or any(value.lower() == "fp8" for value in given)


def launched_with_fp8() -> bool:
    """Return whether the launcher requested FP8."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8"


def wrap(
    holder: Any,
    package: str,
    wanted: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool],
    names: dict[str, str] | None = None,
) -> None:
    """Wrap methods and functions with ``package.function(original, self, ...)``.

    If one of the names is missing, none is wrapped.

    Args:
        holder: the module or class of the host.
        package: the module of the functions, imported when it is first needed.
        wanted: a function called with the first argument, args and kwargs of each call; if it
            returns False, the original runs directly.
        names: dotted names in the holder, with the functions that wrap them; None: those that
            `_fp8_points` has of the module.
    """
    originals = []
    names = wrapped(holder.__name__) if names is None else names
    for dotted, function in names.items():
        *path, name = dotted.split(".")
        owner = functools.reduce(getattr, path, holder)
        originals.append((owner, name, function, getattr(owner, name)))

    def extended(original: Any, function: str) -> Any:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not wanted(self, args, kwargs):
                return original(self, *args, **kwargs)
            return getattr(import_module(package), function)(original, self, *args, **kwargs)

        wrapper._fp8_original = original  # type: ignore[attr-defined]
        return wrapper

    for owner, name, function, original in originals:
        if not hasattr(original, "_fp8_original"):
            setattr(owner, name, extended(original, function))
