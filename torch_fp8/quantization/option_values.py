"""Validation of option values, and reading options from JSON."""

import json
import os
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any

from torch_fp8.quantization.recipe import RECIPES
from torch_fp8.quantization.suggestions import suggestion

_MOST_BYTES = 2**20
"""Largest size of a configuration file in bytes; a larger file is something else."""
_TYPES: dict[type, tuple[Any, str]] = {
    tuple: ((tuple, list), "a tuple of strings"),
    bool: (bool, "a bool"),
    float: ((int, float), "a number"),
    int: (int, "an int"),
}
"""The types of values that an option takes by the type of its default, and their text in errors."""


def read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Read options from JSON text, from the path of a JSON file, or from a recipe's name.

    Raises:
        TypeError: `source` is no text and no path.
        ValueError: `source` is none of these.
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
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object of FP8Config options, got {values!r}")
    return values


def _read_file(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"{name!r} is larger than {_MOST_BYTES} bytes: no configuration")
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name!r} is not UTF-8 text: {error}") from error
    except OSError as error:
        hint = suggestion(name, ("auto", *RECIPES))
        raise ValueError(
            f"{name!r} is neither a JSON object nor a readable file nor a recipe{hint}"
        ) from error


def option(default: Any, *, of: str = "", **rule: Any) -> Any:
    """Return the field of an option whose values `checked` checks.

    Args:
        default: default value, whose type determines the valid types: a bool, an int, a float (from
            `least` to `most`), a tuple of strings, or one of `choices`; None with `least`: an int
            or None.
        of: words, for `named`: ``layer`` (it may differ from layer to layer), or what it belongs
            to: recipe ``auto`` or ``delayed``, the ``optimizer``, Adam and AdamW alone (``adam``),
            backend ``torch``, the ``monitor``.
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
    is_optional = default is None and least is not None
    kind, items = int if is_optional and value is not None else type(default), (value,)
    types, text = _TYPES.get(kind, (object, ""))
    if not isinstance(value, types) or (isinstance(value, bool) and kind in (int, float)):
        raise TypeError(f"{name} must be {text}, got {value!r}")
    if kind is tuple:
        if not all(isinstance(item, str) and item for item in value):
            raise TypeError(f"{name} must hold non-empty strings, got {value!r}")
        value = items = tuple(value)
    if kind in (int, float):
        if kind is int and least is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
        if most is not None and not least <= value <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {value}: {rule['why']}")
        value = kind(value)
    for item in items if choices else ():
        if item not in choices:
            raise ValueError(
                f"{name}={item!r} is unknown; the valid choices are "
                f"{', '.join(map(repr, choices))}{suggestion(item, choices)}"
            )
    return value
