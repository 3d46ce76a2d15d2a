"""The proposed recipe of each layer with reasons, and all of them as one `FP8Config`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_fp8.config import FP8Config
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
        options: an entry of `FP8Config.overrides`; empty: the model's recipe; None: high precision.
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
    layers = tuple(_for_layer(finding, recipe) for finding in findings)
    smooth = [p for p in layers if p.options == {"smooth_swiglu": True}]
    downs = [p for p in layers if p.found.is_down]
    whole = bool(smooth) and len(smooth) == len(downs)
    options: dict[str, Any] = {"recipe": recipe}
    if whole:
        options["smooth_swiglu"] = True
    different = [p for p in layers if p.options != {} and not (whole and p in smooth)]
    config = FP8Config(**options, overrides=_overrides(different, layers))
    return Proposal(config, layers, tuple(_notes(findings)), dict(skipped))


def _for_layer(found: LayerFindings, recipe: str) -> LayerProposal:
    if found.num_experts:
        return _for_experts(found)
    reasons = []
    padding = _padding(found)
    if padding >= PADDED:
        reasons.append(
            f"{found.num_in} x {found.num_out} is padded to multiples of 16, {100 * padding:.0f} % "
            "more work"
        )
        return LayerProposal(found, None, tuple(reasons))
    if not found.db:
        return LayerProposal(found, {}, ("no token came by: nothing was measured",))
    plain = found.db[recipe]
    if not plain < ENOUGH:  # nor NaN
        return LayerProposal(found, {}, ())
    if found.is_down and found.aligned:
        many = "channel of gate and up is" if found.aligned == 1 else "channels of gate and up are"
        reasons.append(f"{found.aligned} {many} aligned")
    reasons.append(
        f"input channel {found.channel} is {found.ratio:,.0f} times as large as the median one, "
        f"and {recipe} leaves {plain:.1f} dB"
    )
    smooth, finer = found.db.get("smooth_swiglu", 0.0), found.db.get(FINER, 0.0)
    if smooth >= ENOUGH:
        reasons.append(f"scales per channel leave {smooth:.1f} dB")
        return LayerProposal(found, {"smooth_swiglu": True}, tuple(reasons))
    if finer >= ENOUGH:
        reasons.append(f"{FINER} leaves {finer:.1f} dB")
        return LayerProposal(found, {"recipe": FINER}, tuple(reasons))
    best = max(smooth, finer)
    reasons.append(f"finer scales leave no more than {best:.1f} dB")
    return LayerProposal(found, None, tuple(reasons))


def _for_experts(found: LayerFindings) -> LayerProposal:
    """Propose FP8 or high precision for a module of experts, whose casts have a fixed recipe."""
    if not found.db:
        return LayerProposal(found, {}, ("no token came by: nothing was measured",))
    reasons = []
    if found.without_tokens:
        of_all = f"{found.without_tokens} of {found.num_experts} experts"
        reasons.append(f"{of_all} got no token and were not measured")
    db = found.db[EXPERT_RECIPE]
    if not db < ENOUGH:  # nor NaN
        return LayerProposal(found, {}, tuple(reasons))
    reasons.append(f"{EXPERT_RECIPE} leaves {db:.1f} dB of {found.worst}")
    return LayerProposal(found, None, tuple(reasons))


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
