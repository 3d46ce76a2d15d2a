"""The options of `torch_fp8.FP8Config`: their values, and what contradicts each other."""

import json
import os
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any

from torch_fp8.quantization.argument_types import check_type
from torch_fp8.quantization.overrides import HIGH_PRECISION, Overrides, is_high_precision
from torch_fp8.quantization.recipe import E4M3_ONLY, RECIPES
from torch_fp8.quantization.wording import check_choice, suggestion

_MOST_BYTES = 2**20
"""Largest size of a configuration file in bytes; a larger file is something else."""


def read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Read options from JSON text, from the path of a JSON file, or from a recipe's name.

    Raises:
        TypeError: `source` is neither text nor a path.
        ValueError: the text is none of these, or the file cannot be read.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "FP8Config.from_json takes JSON text, the path of a JSON file, or a recipe's name, got "
            f"{type(source).__name__}; FP8Config(**options) takes a dict's items"
        )
    text = os.fspath(source).strip()
    if text in ("auto", *RECIPES):
        return {"recipe": text}
    try:
        values = json.loads(text if text.startswith("{") else _read_file(text))
    except (json.JSONDecodeError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"not valid JSON: {reason}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{text!r} is not UTF-8 text: {error}") from error
    except OSError as error:
        nor = f"nor a recipe{suggestion(text, ('auto', *RECIPES))}"
        raise ValueError(f"{text!r} is neither a JSON object nor a readable file {nor}") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object of FP8Config options, got {values!r}")
    return values


def _read_file(name: str) -> str:
    with Path(name).open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{name!r} is larger than {_MOST_BYTES} bytes, so no configuration")
    return content.decode()


def option(default: Any, *, of: str = "", **rule: Any) -> Any:
    """Return the field of an option whose values `checked` checks.

    Args:
        default: default value, whose type determines the valid types: a bool, an int, a float (from
            `least` to `most`), a tuple of strings, or one of `choices`. None with `least` means an
            int or None.
        of: words by which `named` finds the option: ``layer`` if its value may differ between
            layers, and what it belongs to: recipe ``auto`` or ``delayed``, the ``optimizer``, only
            Adam and AdamW (``adam``), backend ``torch``, or the ``monitor``.
        rule: ``choices``, a tuple of valid values or of valid items of a tuple; ``least`` and
            ``most``, bounds of a number, with ``why``, the reason for the upper one.
    """
    return field(default=default, metadata={**rule, "of": of.split()})


def named(config: Any, word: str) -> list[str]:
    """Return the options whose field carries `word`; see `option`."""
    return [f.name for f in fields(config) if word in f.metadata.get("of", ())]


def given(config: Any, word: str) -> list[str]:
    """Return the options of `named` whose value is not the default."""
    names, defaults = named(config, word), {f.name: f.default for f in fields(config)}
    return [name for name in names if getattr(config, name) != defaults[name]]


def checked(of_field: "Field[Any]", value: Any) -> Any:
    """Return the value of an option, a list as a tuple.

    Raises:
        TypeError: the value has another type.
        ValueError: the value is not among the choices, or out of bounds.
    """
    name, rule, default = f"FP8Config.{of_field.name}", of_field.metadata, of_field.default
    choices, least, most = rule.get("choices", ()), rule.get("least"), rule.get("most")
    several = isinstance(default, tuple)
    value = tuple(value) if several and isinstance(value, list) else value
    if several or not choices:
        check_type(name, value, of_field.type)
    if several and not all(value):
        raise TypeError(f"{name} must hold non-empty strings, got {value!r}")
    for item in (value if several else (value,)) if choices else ():
        check_choice(name, item, choices)
    if least is not None and value is not None:
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
        if most is not None and not value <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {value}: {rule['why']}")
    return float(value) if isinstance(default, float) else value


def _check_override(config: Any, pattern: str, options: Mapping[str, Any] | None) -> None:
    """Check the options of one pattern.

    Args:
        config: `torch_fp8.FP8Config`.
        pattern, options: one of its overrides.
    Raises:
        ValueError, TypeError: the options do not fit the configuration.
    """
    where, errors = f"FP8Config.overrides[{pattern!r}]", []
    tried = [options]
    if options and "recipe" not in options:  # layers may get a recipe from another pattern
        others = [o["recipe"] for o in config.overrides.values() if o and "recipe" in o]
        tried += [{**options, "recipe": recipe} for recipe in others if recipe != HIGH_PRECISION]
    for each in tried:
        try:
            config.overridden(each)
        except (ValueError, TypeError) as error:
            errors.append(error)
    if len(errors) == len(tried):
        raise type(errors[0])(f"{where}: {errors[0]}") from errors[0]
    skip = set(config.skip) - ({"lm_head"} if config.loss_head == "fp8" else set())
    if pattern in skip and not is_high_precision(options):
        raise ValueError(
            f"{where} gives options to layers that skip={config.skip!r} keeps in high precision; "
            f"remove {pattern!r} from one of the two"
        )
    if options and config.backend == "transformer-engine":
        raise ValueError(
            f"{where} is not supported by Transformer Engine, which runs one recipe; use None or "
            f"{{'recipe': 'bf16'}}, or leave backend out"
        )


PROBES = ("clip_search", "logit_sharpness")
ON_ALARM = ("warn", "bf16", *RECIPES)
_TE = ("transformer-engine",)
_FINER = "a recipe that all layers already run; choose a finer one, or on_alarm='bf16'"
_OTHERS = tuple(name for name in RECIPES if name != "tensorwise")
_OWNERS: tuple[tuple[str, str, Container[object], object], ...] = (
    ("auto", "recipe", ("auto",), "auto"),
    ("delayed", "recipe", ("delayed",), "delayed"),
    ("optimizer", "opt_level", ("O2", "O3"), "O2"),
    ("torch", "backend", ("torch",), "torch"),
    ("monitor", "monitor", range(1, sys.maxsize), 100),
)
"""A group of options as in `option(of=...)`, its owner, the owner's values with which they apply,
and the value to suggest.
"""
_PAIRS: tuple[tuple[str, tuple[object, ...], str, tuple[object, ...], str], ...] = (
    ("recipe", E4M3_ONLY, "grad_format", ("e5m2",), "it takes gradients in E4M3 only"),
    ("recipe", _OTHERS, "graph_scales", ("last_step",), "only tensorwise layers use these scales"),
    ("opt_level", ("O1",), "cache_weights", (True,), "O1 leaves weights unchanged"),
    ("opt_level", ("O1",), "frozen_weights", ("fp8",), "O1 leaves weights unchanged"),
    ("opt_level", ("O1",), "merge_aware", (True,), "O1 leaves weights unchanged"),
    ("merge_aware", (True,), "frozen_weights", ("keep",), "it merges into a base stored in FP8"),
    ("merge_aware", (True,), "eval_fp8", (False,), "merged weights always run in FP8"),
    ("merge_aware", (True,), "bf16_last", (), "merged weights always run in FP8"),
    ("on_alarm", RECIPES, "cache_weights", (True,), "that recipe casts weights differently"),
    ("backend", _TE, "cache_weights", (True,), "it casts weights itself"),
    ("backend", _TE, "recipe", ("rowwise",), "it has tensorwise, delayed, blockwise and mxfp8"),
    ("backend", _TE, "amax_history_len", (1,), "its histories are longer"),
    *(("on_alarm", (r,), "recipe", (r,), _FINER) for r in RECIPES),
)
"""An option and some of its values, another option and values that they exclude (if none are given,
all true ones), and the reason.
"""


def check_options(config: Any) -> None:
    """Check all options of an `FP8Config`: each value, those of some layers, and contradictions.

    Args:
        config: the configuration; a list becomes a tuple, and overrides become `Overrides`.
    Raises:
        ValueError, TypeError: see `checked`, `Overrides.checked` and `_check_override`; options
            exclude each other.
    """
    overrides = Overrides.checked(config.overrides, named(config, "layer"))
    object.__setattr__(config, "overrides", overrides)
    for of_field in fields(config):
        object.__setattr__(config, of_field.name, checked(of_field, getattr(config, of_field.name)))
    for text in _contradictions(config):
        raise ValueError(f"FP8Config: {text}")
    for pattern, options in config.overrides.items():
        _check_override(config, pattern, options)


def _contradictions(config: Any) -> Iterator[str]:
    for group, owner, valid, instead in _OWNERS:
        names, value = given(config, group), getattr(config, owner)
        if names and value not in valid:
            yield (
                f"{owner}={value!r} excludes {', '.join(names)}; use {owner}={instead!r}, or leave "
                "that out"
            )
    for one, values, other, excluded, reason in _PAIRS:
        x, y = getattr(config, one), getattr(config, other)
        if x in values and (y in excluded if excluded else y):
            yield f"{one}={x!r} excludes {other}={y!r}: {reason}; leave one of them out"
    if config.wgrad == "bf16" and "wgrad" in config.fast_accum:
        yield "wgrad='bf16' excludes fast_accum=('wgrad',): only FP8 GEMMs have it; leave one out"
