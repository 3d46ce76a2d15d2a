"""`check_arguments` compares what a user passes to a public function with its annotations."""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import torch
from torch import nn
from torch.optim import Optimizer

_ACCEPTED = {float: (int, float), Path: (os.PathLike,), torch.device: (torch.device, int)}
"""The classes of valid values, where they are not the annotated class alone."""
_TEXTS: dict[Any, str] = {
    nn.Module: "an nn.Module",
    Optimizer: "a torch.optim.Optimizer",
    type(None): "None",
    float: "a number",
    Path: "a path",
}


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], name: str = ""
) -> None:
    """Check the arguments of a public function against its annotations.

    Annotations with ``Any`` are not checked, nor is a `config` that may be the name of a recipe,
    because `torch_fp8.config.config_or_default` checks it.

    Args:
        function: annotated function.
        arguments: values by name; ``locals()`` at the start of the function.
        name: public name of the function, or empty for its own.
    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is not a device or not a floating-point dtype.
    """
    for argument, hint in _hints(function).items():
        if argument != "config" or str not in get_args(hint):
            place = f"{name or function.__name__}({argument}=...)"
            check_type(place, arguments[argument], hint)


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(inspect.unwrap(function))
    return {name: hint for name, hint in hints.items() if name != "return"}


def check_type(place: str, value: object, hint: Any) -> None:
    """Check a value against an annotation.

    Args:
        place: the argument or option, for errors.
        value: its value.
        hint: its annotation: a class, a container with the class of its items, or a union.
    Raises:
        TypeError, ValueError: see `check_arguments`.
    """
    members = _members(hint)
    if Any in members:
        return
    if not any(_fits(value, member) for member in members):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        got = repr(value) if isinstance(value, (str, int, float, tuple)) else got
        valid = " or ".join(map(_text, members))
        raise TypeError(f"{place} takes {valid}, got {got}{_hint(place, value)}")
    if isinstance(value, torch.dtype) and not value.is_floating_point:
        raise ValueError(f"{place} takes a floating-point dtype, got {value}")
    try:
        if torch.device in members and value is not None:
            torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{place} takes a device of torch, got {value!r}: {error}") from None


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _fits(value: object, member: Any) -> bool:
    """Return whether a value, and each item of a container, has the annotated type."""
    origin, items = get_origin(member) or member, get_args(member)
    if origin is Optimizer:  # hosts also pass wrappers, which derive from no class of torch
        return hasattr(value, "param_groups") and not isinstance(value, type)
    if not isinstance(value, _ACCEPTED.get(origin, origin)):
        return False
    if isinstance(value, (bool, str, bytes)):
        return origin in (bool, str)
    is_read = isinstance(value, Iterator) or not issubclass(origin, Iterable)
    if is_read or issubclass(origin, Mapping) or not items:
        return True
    return all(any(_fits(item, kind) for kind in _members(items[0])) for item in value)


def _text(member: Any) -> str:
    """Name an annotated type in an error."""
    origin, items = get_origin(member) or member, get_args(member)
    name = origin.__name__
    text = _TEXTS.get(origin, f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}")
    if items and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return f"{text} of {getattr(items[0], '__name__', items[0])}"
    return text


def _hint(place: str, value: object) -> str:
    """Return what to call or pass instead; empty if the valid types are hint enough."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        return "; pass an instance of the class"
    if isinstance(value, Optimizer) and place.startswith(("convert_to", "conversion_report")):
        return "; torch_fp8.convert_optimizer(optimizer, config, model=model) converts an optimizer"
    if isinstance(value, nn.Module) and place.startswith("convert_optimizer(optimizer"):
        return "; torch_fp8.convert_to_float8(model, config) converts a model"
    return ""
