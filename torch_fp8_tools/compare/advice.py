"""One sentence of advice: whether to turn FP8 on, in which variant, or why not."""

from typing import NamedTuple

from torch_fp8_tools.compare.outcome import Outcome, VariantOutcome
from torch_fp8_tools.compare.trials import INTERRUPTED

FASTER, LESS_MEMORY, WORSE = 1.03, 0.95, 0.005
"""A variant counts as faster from this speedup on, as smaller up to this share of the memory, and
as worse if its loss is certainly higher by more than this share."""
_LARGEST = 0.3


class Advice(NamedTuple):
    """A sentence, and the variant that it recommends, or None for BF16."""

    sentence: str
    variant: VariantOutcome | None


def advise(result: Outcome) -> Advice:
    """Return the advice for an outcome."""
    reference, *others = result.variants
    if INTERRUPTED in [variant.error for variant in result.variants]:
        return Advice("Interrupted before every variant had run, so there is no advice.", None)
    if reference.records[0].result.get("not_comparable"):
        return Advice(f"Nothing could be compared: {reference.error}.", None)
    if reference.error is not None:
        return Advice(
            f"The program fails in BF16, so this is not FP8's fault: {reference.error}.", None
        )
    ran = [v for v in others if v.error is None and v.step_seconds is not None]
    if not ran:
        return Advice("No FP8 variant ran to its end; the table has their errors.", None)
    sound = [v for v in ran if not v.diverged and not _is_worse(v)]
    if not sound:
        best = min(ran, key=lambda v: v.difference.mean if v.difference else 0.0)
        return Advice(f"FP8 costs loss here: {_loss(best)} at {best.name}; leave it off.", None)
    if result.device == "cpu":
        best = min(sound, key=lambda v: v.peak or 0)
        return Advice(
            f"FP8 at {best.name} {_memory(reference, best)}, and {_loss(best)}. These times are of "
            "a CPU that emulates FP8, so there is no advice on speed: run this command on a GPU.",
            best,
        )
    best = max(sound, key=lambda v: speedup(reference, v))
    gain = speedup(reference, best)
    if gain >= FASTER:
        return Advice(
            f"FP8 at {best.name} {_memory(reference, best)} and is {gain:.2f} times as fast; "
            f"{_loss(best)}: turn it on.",
            best,
        )
    smallest = min(sound, key=lambda v: v.peak or 0)
    why = _why_not_faster(smallest)
    if _share(reference, smallest) <= LESS_MEMORY:
        return Advice(
            f"FP8 is not faster here ({speedup(reference, smallest):.2f} times){why}, but at "
            f"{smallest.name} it {_memory(reference, smallest)}; {_loss(smallest)}: turn it on if "
            "memory is what limits you.",
            smallest,
        )
    return Advice(f"FP8 is not faster here ({gain:.2f} times){why}: leave it off.", None)


def speedup(reference: VariantOutcome, variant: VariantOutcome) -> float:
    """Return BF16's time of a step divided by the variant's."""
    if reference.step_seconds is None or not variant.step_seconds:
        return 0.0
    return reference.step_seconds / variant.step_seconds


def _share(reference: VariantOutcome, variant: VariantOutcome) -> float:
    return variant.peak / reference.peak if reference.peak and variant.peak else 1.0


def _is_worse(variant: VariantOutcome) -> bool:
    apart = variant.difference
    return apart is not None and apart.is_certain and apart.mean > WORSE


def _memory(reference: VariantOutcome, variant: VariantOutcome) -> str:
    if not reference.peak or not variant.peak:
        return "ran too few steps to measure memory"
    share = _share(reference, variant)
    if share <= 1:
        return f"saves {100 * (1 - share):.0f} % of memory"
    return f"takes {100 * (share - 1):.0f} % more memory"


def _loss(variant: VariantOutcome) -> str:
    if variant.diverged:
        return "the loss is not finite"
    if variant.difference is None:
        return "no loss was seen"
    return f"the loss differs by {variant.difference}"


def _why_not_faster(variant: VariantOutcome) -> str:
    """Return the largest obstacle to a speedup, with a colon."""
    if variant.flops and variant.flops < 0.5:
        return f": only {100 * variant.flops:.0f} % of the matmul FLOPs run in FP8"
    parts = {k: v for k, v in variant.profile.items() if k not in ("forward", "backward")}
    parts["data loading"] = max(parts.get("data loading", 0.0), variant.loading)
    part = max(parts, key=lambda name: parts[name])
    if parts[part] < _LARGEST:
        return ""
    noun = {"data loading": "the data loader", "optimizer": "the optimizer"}.get(part, part)
    return f": {100 * parts[part]:.0f} % of the time is {noun}"
