"""The variants of a comparison: BF16, or options of FP8Config, from the user's words."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_fp8.config import FP8Config
from torch_fp8.quantization.options import read_json
from torch_fp8.quantization.recipe import RECIPES
from torch_fp8.quantization.wording import suggestion

BF16 = "bf16"
_LEVELS = ("O1", "O2", "O3")


@dataclass(frozen=True)
class Variant:
    """A way to run the program.

    Attributes:
        name: name, as the user wrote it.
        options: fields of FP8Config that it sets, or None for BF16.
    """

    name: str
    options: Mapping[str, Any] | None

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-.") or "variant"


def variants(texts: Sequence[str]) -> list[Variant]:
    """Return the variants, BF16 first.

    Args:
        texts: "bf16", "fp8", or levels, recipes and ``field=value`` separated by commas, JSON, or
            the path of a JSON file.
    Raises:
        ValueError, TypeError: a text is no variant, an option is not valid, or two variants are
            the same.
    """
    parsed = [Variant(text, _options(text)) for text in texts]
    if not any(variant.options is None for variant in parsed):
        parsed.insert(0, Variant(BF16, None))
    folders = [variant.folder for variant in parsed]
    twice = next((v.name for i, v in enumerate(parsed) if v.folder in folders[:i]), None)
    if twice is not None:
        raise ValueError(f"--variants names {twice!r} twice; every variant runs once for each seed")
    if len(parsed) == 1:
        raise ValueError("--variants names only BF16; add a level or a recipe, such as O2")
    return sorted(parsed, key=lambda variant: variant.options is not None)


def _options(text: str) -> dict[str, Any] | None:
    if text.lower() == BF16:
        return None
    if text.lstrip().startswith("{") or text.endswith(".json"):
        options = dict(read_json(Path(text) if text.endswith(".json") else text))
        FP8Config(**options)
        return options
    options = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, mark, value = word.partition("=")
        if mark:
            options[name.strip()] = _value(value.strip())
        elif word.upper() in _LEVELS:
            options["opt_level"] = word.upper()
        elif word.lower() in ("auto", *RECIPES):
            options["recipe"] = word.lower()
        elif word.lower() != "fp8":
            known = (BF16, "fp8", *_LEVELS, "auto", *RECIPES)
            raise ValueError(
                f"--variants: {word!r} is no level, recipe or field=value"
                f"{suggestion(word, known)}; write for example bf16 O2 'O3, rowwise'"
            )
    FP8Config(**options)
    return options


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value
