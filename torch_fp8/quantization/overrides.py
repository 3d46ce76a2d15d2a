"""`Overrides`: options for some layers, by patterns on their qualified names.

Don't move the class: pickles of configurations refer to it by this module's name.
"""

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch_fp8.quantization.recipe import RECIPES
from torch_fp8.quantization.wording import check_choice, suggestion

HIGH_PRECISION = "bf16"
"""The recipe of layers that stay in high precision."""


class Overrides(dict[str, "dict[str, Any] | None"]):
    """An immutable dictionary from pattern to options, or to None for high precision."""

    @classmethod
    def checked(cls, value: object, names: Collection[str]) -> "Overrides":
        """Validate a mapping of patterns and return it as `Overrides`.

        Args:
            value: value of the option.
            names: options of `torch_fp8.FP8Config` that may differ from layer to layer.
        Raises:
            TypeError: `value` does not map non-empty strings to mappings or None.
            ValueError: an option cannot differ from layer to layer, or contradicts high precision.
        """
        if not isinstance(value, Mapping):
            raise TypeError(
                "FP8Config.overrides must map patterns to options, as {'layers.0': {'recipe': "
                f"'blockwise'}}}}, got {value!r}"
            )
        for pattern, options in value.items():
            where = f"FP8Config.overrides[{pattern!r}]"
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"{where}: a pattern must be a non-empty string")
            if options is None:
                continue
            if not isinstance(options, Mapping):
                is_text = isinstance(options, str)
                hint = f"; did you mean {{'recipe': {options!r}}}?" if is_text else ""
                raise TypeError(f"{where} must map options to values, got {options!r}{hint}")
            unknown = [name for name in options if name not in names]
            if unknown:
                raise ValueError(
                    f"{where}: {', '.join(map(repr, unknown))} cannot differ between layers; "
                    f"options that can are {', '.join(names)}{suggestion(unknown[0], names)}"
                )
            recipe = options.get("recipe", HIGH_PRECISION)
            check_choice(f"{where}: a layer's recipe", recipe, (*RECIPES, HIGH_PRECISION))
            others = ", ".join(repr(name) for name in options if name != "recipe")
            if options.get("recipe") == HIGH_PRECISION and others:
                raise ValueError(f"{where}: recipe 'bf16' has no {others}; leave one of them out")
        return cls({p: None if o is None else _plain(o) for p, o in value.items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))

    def __reduce__(self) -> Any:
        return Overrides, (list(self.items()),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "FP8Config.overrides cannot be changed; make a new FP8Config with dataclasses.replace"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = popitem = setdefault = update = _refuse

    def pop(self, key: str, *default: Any) -> Any:
        """Return the default for a missing key, as LightningCLI needs; raise for any other call."""
        return default[0] if default and key not in self else self._refuse()


def is_high_precision(options: Mapping[str, Any] | None) -> bool:
    """Return whether the value of an override keeps layers in high precision."""
    return options is None or options.get("recipe") == HIGH_PRECISION


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
