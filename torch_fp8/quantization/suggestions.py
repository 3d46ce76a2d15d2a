"""Error messages for unknown and removed names, with what to write instead."""

import difflib
import functools
from collections.abc import Collection, Iterable
from typing import Any

_ELSEWHERE = {
    "rowwise_with_gw_hp": "recipe='rowwise', wgrad='bf16'",
    "Float8CurrentScaling": "recipe='tensorwise'",
    "DelayedScaling": "recipe='delayed'",
    "Float8BlockScaling": "recipe='blockwise'",
    "MXFP8BlockScaling": "recipe='mxfp8'",
}
"""Our options for the names of recipes in torchao and Transformer Engine."""

REMOVED = {
    "moment_bits": "leave it out, moments have 8 bits; 4 bits cost loss",
    "residual_bits": "leave it out, residuals have 8 bits; fewer bits lost updates",
    "save_attention": "leave it out, since it cost loss; checkpoint blocks to save more memory",
}
"""What to do instead of using an option that 0.1.0 had and this version removed."""


def suggestion(value: object, choices: Iterable[object]) -> str:
    """Return a suggestion to replace `value`, as the end of a message, or "".

    Args:
        value: unknown name.
        choices: known names.
    """
    if str(value) in _ELSEWHERE:
        return f"; another library's {value!r} is called {_ELSEWHERE[str(value)]} here"
    words = {str(choice).lower(): choice for choice in choices}
    near = difflib.get_close_matches(str(value).lower(), words, n=1)
    return f"; did you mean {words[near[0]]!r}?" if near else ""


def unknown_options(given: Iterable[str], known: Collection[str], taker: str) -> str:
    """Return an error message for unknown or removed option names of `taker`; "": all are known."""
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return ""
    if removed := [f"{name!r}: {REMOVED[name]}" for name in unknown if name in REMOVED]:
        return f"{taker} no longer takes {'; '.join(removed)}"
    names, valid = ", ".join(map(repr, unknown)), ", ".join(known)
    hint = suggestion(unknown[0], known)
    return f"unknown {taker} option(s) {names}; the valid ones are {valid}{hint}"


def naming_valid_options(cls: type, names: Collection[str]) -> None:
    """Make a class raise a TypeError that lists the valid options for an unknown keyword."""
    init: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if unknown := unknown_options(options, names, cls.__name__):
            raise TypeError(unknown)
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
