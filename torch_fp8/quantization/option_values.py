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
    if not text.startswith("{"):
        text = _read_file(text)
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except RecursionError:
        raise ValueError("not a JSON object of FP8Config options: it is nested too deep") from None
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object of FP8Config options, got {values!r}")
    return values


def _read_file(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(
                f"{name!r} is larger than {_MOST_BYTES} bytes, which is too large for a "
                "configuration"
            )
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name!r} is not UTF-8 text: {error}") from error
    except OSError as error:
        hint = suggestion(name, ("auto", *RECIPES))
        raise ValueError(
            f"{name!r} is neither a JSON object nor a readable file nor a recipe{hint}"
        ) from error


def option(
    default: Any,
    *,
    choices: tuple[object, ...] = (),
    least: int | None = None,
    most: int | None = None,
    why: str = "",
    of: str = "",
) -> Any:
    """Return the field of an option whose values `checked` checks.

    Args:
        default: default value, whose type determines the valid types: a bool, an int, a tuple of
            strings, or one of `choices`; None with `least`: an int or None.
        choices: valid values, or valid items of a tuple; for a bool, valid values beside True and
            False.
        least, most: bounds of an int, with the reason `why` for the upper one.
        of: words, for `named`: ``layer`` (it may differ from layer to layer), or what it belongs
            to: recipe ``auto`` or ``delayed``, the ``optimizer``, Adam and AdamW alone (``adam``),
            backend ``torch``, the ``monitor``.
    """
    rule = {"choices": choices, "least": least, "most": most, "why": why}
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
    name, rule, default = of_field.name, of_field.metadata, of_field.default
    choices = rule["choices"]
    if isinstance(default, tuple):
        value = str_tuple(name, value)
        for item in value if choices else ():
            check_choice(name, item, choices)
    elif isinstance(default, bool):
        if not isinstance(value, bool) and value not in choices:
            valid = "".join(f" or {choice!r}" for choice in choices)
            raise TypeError(f"FP8Config.{name} must be a bool{valid}, got {value!r}")
    elif isinstance(default, int) or (rule["least"] is not None and value is not None):
        check_int(name, value, rule["least"])
        if rule["most"] is not None and value > rule["most"]:
            raise ValueError(
                f"FP8Config.{name} must be from {rule['least']} to {rule['most']}, got {value}: "
                f"{rule['why']}"
            )
    if choices and not isinstance(default, (tuple, bool)):
        check_choice(name, value, choices)
    return value


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError for a value of option `name` that is none of `choices`."""
    if value not in choices:
        valid = ", ".join(repr(c) for c in choices)
        raise ValueError(
            f"FP8Config.{name}={value!r} is unknown; the valid choices are {valid}"
            f"{suggestion(value, choices)}"
        )


def check_int(name: str, value: object, least: int | None) -> None:
    """Raise for a value that is no int (TypeError) or smaller than `least` (ValueError)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"FP8Config.{name} must be an int, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"FP8Config.{name} must be at least {least}, got {value}")


def str_tuple(name: str, value: object) -> tuple[str, ...]:
    """Return a tuple or list of strings as a tuple; raise TypeError for anything else."""
    if isinstance(value, str) or not isinstance(value, (tuple, list)):
        raise TypeError(f"FP8Config.{name} must be a tuple of strings, got {value!r}")
    if not all(isinstance(item, str) and item for item in value):
        raise TypeError(f"FP8Config.{name} must hold non-empty strings, got {value!r}")
    return tuple(value)
