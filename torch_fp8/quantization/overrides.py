"""`Overrides`: options for some layers, by patterns on their qualified names."""

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch_fp8.quantization.recipe import RECIPES
from torch_fp8.quantization.suggestions import suggestion

HIGH_PRECISION = "bf16"
"""The recipe of layers that stay in high precision."""


class Overrides(dict[str, "dict[str, Any] | None"]):
    """A dictionary from pattern to options, or None for high precision, that does not change."""

    @classmethod
    def checked(cls, value: object, names: Collection[str]) -> "Overrides":
        """Return `value`, a mapping of patterns, as it is kept.

        Args:
            value: the option's value.
            names: the options of `torch_fp8.FP8Config` that may differ from layer to layer.
        Raises:
            TypeError: it is no mapping of non-empty strings to mappings or None.
            ValueError: an option that layers cannot have of their own, or with high precision.
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
                hint = f"; did you mean {{'recipe': {options!r}}}?" if _is_name(options) else ""
                raise TypeError(f"{where} must map options to values, got {options!r}{hint}")
            unknown = [name for name in options if name not in names]
            if unknown:
                raise ValueError(
                    f"{where}: {', '.join(map(repr, unknown))} cannot differ from layer to layer; "
                    f"what can is {', '.join(names)}{suggestion(unknown[0], names)}"
                )
            if options.get("recipe", HIGH_PRECISION) not in (*RECIPES, HIGH_PRECISION):
                valid = ", ".join(map(repr, (*RECIPES, HIGH_PRECISION)))
                raise ValueError(
                    f"{where}: recipe={options['recipe']!r} is none that layers can have of their "
                    f"own; the valid choices are {valid}"
                    f"{suggestion(options['recipe'], RECIPES)}"
                )
            others = [repr(name) for name in options if name != "recipe"]
            if options.get("recipe") == HIGH_PRECISION and others:
                raise ValueError(
                    f"{where}: recipe 'bf16' has no {', '.join(others)}; leave one of them out"
                )
        return cls((p, None if o is None else _plain(o)) for p, o in value.items())

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))

    def __reduce__(self) -> Any:
        return Overrides, (list(self.items()),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("FP8Config.overrides does not change; dataclasses.replace makes a new one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = popitem = setdefault = update = _refuse

    def pop(self, key: str, *default: Any) -> Any:
        """Return the default of a key that is not there, which LightningCLI asks for."""
        return default[0] if default and key not in self else self._refuse()


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()
