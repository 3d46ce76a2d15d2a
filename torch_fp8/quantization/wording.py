"""Text for messages: counts, lists, tables, and what to write for an unknown or removed name."""

import difflib
import functools
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def counted(count: int, noun: str) -> str:
    """Return "1 weight" or "2 weights" for the noun "weight"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_of(items: Sequence[object], most: int = 3, separator: str = ", ") -> str:
    """Join the first `most` items and the number of the others: "a, b, c and 2 more"."""
    more = len(items) - most
    others = f"{separator.strip(', ')} and {more} more" if more > 0 else ""
    return separator.join(map(str, items[:most])) + others


def by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group pairs of a name and a reason: return the names of each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return names


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align the cells of a table, the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)]
    return "\n".join("  ".join(forms).format(*row).rstrip() for row in rows)


_ELSEWHERE = {
    "rowwise_with_gw_hp": "recipe='rowwise', wgrad='bf16'",
    "Float8CurrentScaling": "recipe='tensorwise'",
    "DelayedScaling": "recipe='delayed'",
    "Float8BlockScaling": "recipe='blockwise'",
    "MXFP8BlockScaling": "recipe='mxfp8'",
}
"""Our options for the names of recipes in torchao and Transformer Engine."""

_REPLACED: dict[Any, Any] = {"both": True}
"""Values that 0.1.0 had: ``cache_weights="both"`` kept a second layout."""

REMOVED: dict[str, str] = {
    "on_loss_spike": "a jump of the loss only warns; on_alarm='bf16' moves layers out of FP8, and "
    "a run goes back by its host's checkpoints",
    "moment_bits": "leave it out, moments have 8 bits; 4 bits cost loss",
    "residual_bits": "leave it out, residuals have 8 bits; fewer bits lost updates",
    "save_format": "save as usual, and run torch-fp8 export on the saved folder",
    "save_attention": "leave it out, since it cost loss; checkpoint blocks to save more memory",
}
"""What to do instead of using an option that 0.1.0 had and this version removed."""
_DEFAULTS = {
    "on_loss_spike": "warn",
    "save_attention": "bf16",
    "moment_bits": 8,
    "residual_bits": 8,
}
"""The defaults that removed options had: pickled configurations hold every option."""


def suggestion(value: object, choices: Iterable[object]) -> str:
    """Return a suggestion to replace `value`, as the end of a message, or "".

    Args:
        value: unknown name.
        choices: known names.
    """
    if str(value) in _ELSEWHERE:
        return f"; another library's {value!r} is called {_ELSEWHERE[str(value)]} here"
    if str(value) in _REPLACED:
        return f"; 0.1.0's {value!r} is {_REPLACED[value]!r} now"
    words = {str(choice).lower(): choice for choice in choices}
    near = difflib.get_close_matches(str(value).lower(), words, n=1)
    return f"; did you mean {words[near[0]]!r}?" if near else ""


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError if a value of the option `name` is not one of the choices."""
    if value not in choices:
        raise ValueError(
            f"{name}={value!r} is unknown; the valid choices are "
            f"{', '.join(map(repr, choices))}{suggestion(value, choices)}"
        )


def unknown_options(given: Iterable[str], known: Collection[str], taker: str) -> str:
    """Return an error message for unknown or removed option names of `taker`, or "" for none."""
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return ""
    if removed := [f"{name!r}: {REMOVED[name]}" for name in unknown if name in REMOVED]:
        return f"{taker} no longer takes {'; '.join(removed)}"
    names, valid = ", ".join(map(repr, unknown)), ", ".join(known)
    hint = suggestion(unknown[0], known)
    return f"unknown {taker} option(s) {names}; the valid ones are {valid}{hint}"


def without_removed(state: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the known options of a pickled configuration; warn about others that were set."""
    for name in state.keys() - set(known):
        if state[name] != _DEFAULTS.get(name):
            warnings.warn(
                f"a configuration that 0.1.0 pickled has {name!r}: {state[name]!r}, which is "
                f"ignored: {REMOVED.get(name, 'this version has no such option')}",
                stacklevel=3,
            )
    options = {name: value for name, value in state.items() if name in known}
    if options.get("cache_weights") in _REPLACED:
        options["cache_weights"] = _REPLACED[options["cache_weights"]]
    return options


def naming_valid_options(cls: type, names: Collection[str]) -> None:
    """Make a class raise a TypeError that lists the valid options for an unknown keyword."""
    init: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if unknown := unknown_options(options, names, cls.__name__):
            raise TypeError(unknown)
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
