"""Configurations and recipes of layers with `FP8Config.overrides`; patterns without a match."""

import difflib
import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.nn.class_swap import unwrapped_name
from torch_fp8.nn.layer_filter import matches
from torch_fp8.quantization.overrides import is_high_precision

_NEAREST = 3


def layer_options(names: Iterable[str], config: FP8Config) -> dict[str, FP8Config]:
    """Return the configuration of each layer that has an override.

    Args:
        names: qualified names of the layers that run in FP8.
        config: configuration of the model.
    Raises:
        ValueError: several patterns match a layer, and their options contradict each other.
    """
    # One object per set of options, not per layer, because layers compare their configurations.
    configs: dict[str, FP8Config] = {}
    options_of = {}
    for name in names if config.overrides else ():
        options = _options(name, config)
        if not options:
            continue
        if repr(options) not in configs:
            try:
                configs[repr(options)] = config.overridden(options)
            except ValueError as error:
                raise ValueError(f"FP8Config.overrides, together, for '{name}': {error}") from error
        options_of[name] = configs[repr(options)]
    return options_of


def high_precision_pattern(name: str, config: FP8Config) -> str | None:
    """Return a description of the override that keeps a module in high precision, or None."""
    matching = [p for p in config.overrides if matches(p, name)]
    if matching and is_high_precision(config.overrides[matching[-1]]):
        return f"overrides={{{matching[-1]!r}: bf16}}"
    return None


def unused_overrides(model: nn.Module, config: FP8Config) -> tuple[str, ...]:
    """Return the override patterns that match no module of `model`; warn about them once."""
    if not config.overrides:
        return ()
    names = [unwrapped_name(name) for name, _ in model.named_modules() if name]
    unused = tuple(p for p in config.overrides if not any(matches(p, n) for n in names))
    if unused and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        said = "; ".join(f"{pattern!r}{_nearest(pattern, names)}" for pattern in unused)
        warnings.warn(
            f"FP8Config.overrides: these patterns match no module of {type(model).__name__}: "
            f"{said}",
            stacklevel=3,
        )
    return unused


def _options(name: str, config: FP8Config) -> dict[str, Any]:
    """Return the options that the overrides give a layer; later patterns win."""
    options: dict[str, Any] = {}
    for pattern, given in config.overrides.items():
        if matches(pattern, name):
            # High precision discards earlier options; later patterns start again from none.
            options = {} if is_high_precision(given) else {**options, **given}
    return options


def _nearest(pattern: str, names: list[str]) -> str:
    """Return the names closest to a pattern without a match, as text for a message."""
    parts = pattern.count(".") + 1
    # A pattern may match anywhere in a name: compare it with all runs of as many components.
    pieces = dict.fromkeys(
        ".".join(components[i : i + parts])
        for name in names
        for components in [name.split(".")]
        for i in range(len(components) - parts + 1)
    )
    near = difflib.get_close_matches(pattern, list(pieces), _NEAREST, 0.5)
    return f" (the nearest are {', '.join(map(repr, near))})" if near else ""
