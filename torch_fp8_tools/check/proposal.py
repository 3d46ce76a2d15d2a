"""The proposed recipe of each layer with reasons, as one `FP8Config`, and as text of 80 columns."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_fp8.config import FP8Config
from torch_fp8.quantization.wording import by_reason, counted, first_of
from torch_fp8_tools.check.measure import EXPERT_RECIPE, LayerFindings

ENOUGH = 24.0
"""The sufficient SQNR of a product's median row in dB: 4.5 below that of Gaussian operands, three
quarters of a bit.
"""
FINER = "blockwise"
"""The recipe for layers with outliers that a single scale cannot represent."""
PADDED = 0.25
"""The share of padding in a GEMM from which a layer should stay in high precision."""
_MULTIPLE = 16


@dataclass(frozen=True)
class LayerProposal:
    """The proposal for a layer.

    Attributes:
        found: the measurements it is based on.
        options: an entry of `FP8Config.overrides`; empty: the model's recipe, or None for high
            precision.
        reasons: sentences without a full stop.
    """

    found: LayerFindings
    options: dict[str, Any] | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Proposal:
    """The proposal for a model.

    Attributes:
        config: the configuration, with its overrides.
        layers: the proposal of each layer.
        notes: notes on the whole run.
        skipped: the reasons why layers cannot run in FP8 anyway, by qualified name.
    """

    config: FP8Config
    layers: tuple[LayerProposal, ...]
    notes: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)


def propose(findings: Sequence[LayerFindings], recipe: str, skipped: Mapping[str, str]) -> Proposal:
    """Propose a configuration.

    Args:
        findings: the measurements of all layers that FP8 supports.
        recipe: the model's recipe, whose casts were measured, as were those of `FINER`.
        skipped: the reasons why FP8 does not support other layers.
    """
    judged = ((finding, *_reasons(finding, recipe)) for finding in findings)
    layers = tuple(LayerProposal(item, options, tuple(why)) for item, why, options in judged)
    smooth = [p for p in layers if p.options == {"smooth_swiglu": True}]
    downs = [p for p in layers if p.found.is_down]
    whole = bool(smooth) and len(smooth) == len(downs)
    options: dict[str, Any] = {"recipe": recipe}
    if whole:
        options["smooth_swiglu"] = True
    different = [p for p in layers if p.options != {} and not (whole and p in smooth)]
    config = FP8Config(**options, overrides=_overrides(different, layers))
    return Proposal(config, layers, tuple(_notes(findings)), dict(skipped))


def _reasons(found: LayerFindings, recipe: str) -> tuple[list[str], dict[str, Any] | None]:
    """Return the reasons for a layer's options, and the options; experts have a fixed recipe."""
    padding = 0.0 if found.experts else _padding(found)
    if padding >= PADDED:
        shape = f"{found.num_in} x {found.num_out}"
        return [f"{shape} is padded to multiples of 16, {100 * padding:.0f} % more work"], None
    if not found.db:
        return ["no token came by: nothing was measured"], {}
    reasons = []
    if found.experts_without_tokens:
        of_all = f"{found.experts_without_tokens} of {found.experts} experts"
        reasons.append(f"{of_all} got no token and were not measured")
    db = found.db[found.recipe(recipe)]
    if not db < ENOUGH:  # nor NaN
        return reasons, {}
    if found.experts:
        return [*reasons, f"{EXPERT_RECIPE} leaves {db:.1f} dB of {found.worst}"], None
    if found.is_down and found.aligned_channels:
        verb = "is" if found.aligned_channels == 1 else "are"
        channels = counted(found.aligned_channels, "channel")
        reasons.append(f"{channels} of gate and up {verb} aligned")
    reasons.append(
        f"input channel {found.channel} is {found.largest_channel:,.0f} times as large as the "
        f"median one, and {recipe} leaves {db:.1f} dB"
    )
    smooth, finer = found.db.get("smooth_swiglu", 0.0), found.db.get(FINER, 0.0)
    if smooth >= ENOUGH:
        return [*reasons, f"scales per channel leave {smooth:.1f} dB"], {"smooth_swiglu": True}
    if finer >= ENOUGH:
        return [*reasons, f"{FINER} leaves {finer:.1f} dB"], {"recipe": FINER}
    return [*reasons, f"finer scales leave no more than {max(smooth, finer):.1f} dB"], None


def _padding(found: LayerFindings) -> float:
    """Return the share of a layer's GEMM work that padding adds."""
    padded = [-(-size // _MULTIPLE) * _MULTIPLE for size in (found.num_in, found.num_out)]
    return padded[0] * padded[1] / max(1, found.num_in * found.num_out) - 1


def _overrides(
    different: Sequence[LayerProposal], layers: Sequence[LayerProposal]
) -> dict[str, dict[str, Any] | None]:
    """Return the overrides for some layers, one for all of a name if their options agree."""
    overrides: dict[str, dict[str, Any] | None] = {}
    for proposal in different:
        kind = proposal.found.name.rpartition(".")[2]
        alike = [p for p in layers if p.found.name.rpartition(".")[2] == kind]
        common = len(alike) > 1 and all(p.options == proposal.options for p in alike)
        overrides[kind if common else proposal.found.name] = proposal.options
    return overrides


def _notes(findings: Sequence[LayerFindings]) -> list[str]:
    counts = sorted({tokens for finding in findings for tokens in finding.calls})
    odd = [tokens for tokens in counts if tokens % _MULTIPLE]
    if not odd:
        return []
    shown = ", ".join(map(str, odd[:3])) + (", ..." if len(odd) > 3 else "")
    return [
        f"forwards of {shown} tokens are not a multiple of 16: the GEMM for the weight gradient is "
        "padded; a sequence length that is a multiple of 16 avoids that"
    ]


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
