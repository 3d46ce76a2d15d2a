"""A proposal as text of at most 80 columns."""

import textwrap
from collections.abc import Iterator, Sequence

from torch_fp8.quantization.wording import by_reason, first_of
from torch_fp8_tools.check.proposal import LayerProposal, Proposal

WIDTH = 80
_NAME, _DB = 44, 8


def text_of(proposal: Proposal, headline: str) -> str:
    """Return a headline, a row for each layer with its own recipe, and a line for the rest.

    Args:
        proposal: the proposal.
        headline: a description of the measured model.
    """
    return "\n".join([*_wrapped(headline), "", *_lines(proposal)]) + "\n"


def _lines(proposal: Proposal) -> Iterator[str]:
    recipe = proposal.config.recipe
    yield f"{'layer':<{_NAME}}{recipe[: _DB + 4]:>{_DB + 4}}  proposed"
    for layer in proposal.layers:
        if layer.options == {} and not layer.reasons:
            continue
        yield from _row(layer, recipe)
    for experts in (False, True):
        layers = [layer for layer in proposal.layers if bool(layer.found.experts) == experts]
        rest = [layer for layer in layers if layer.options == {} and not layer.reasons]
        if rest:
            runs = rest[0].found.recipe(recipe)
            decibels = sorted(layer.found.db[runs] for layer in rest)
            many = "all" if len(rest) == len(layers) else "the others"
            many = f"{many} ({len(rest)})" + (", modules of experts" if experts else "")
            yield f"{many:<{_NAME}}{_db(decibels[0]):>{_DB + 4}}  {runs}"
    for reason, names in by_reason(proposal.skipped.items()).items():
        yield from _wrapped(f"not in FP8: {first_of(names, 2)}: {reason}")
    for note in proposal.notes:
        yield from _wrapped(f"note: {note}")


def _row(layer: LayerProposal, recipe: str) -> Iterator[str]:
    finding = layer.found
    name = finding.name if len(finding.name) < _NAME else "..." + finding.name[-(_NAME - 4) :]
    db = _db(finding.db.get(finding.recipe(recipe)))
    options = {"recipe": "bf16"} if layer.options is None else layer.options
    recipe = "smooth_swiglu" if "smooth_swiglu" in options else finding.recipe(recipe)
    yield f"{name:<{_NAME}}{db:>{_DB + 4}}  {options.get('recipe', recipe)}"
    yield from _wrapped("; ".join(layer.reasons), "    ")


def _db(value: float | None) -> str:
    return "-" if value is None else f"{min(value, 99.9):.1f} dB"


def _wrapped(text: str, indent: str = "") -> Sequence[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent or "  ")
