"""`Outcome`: the trials of all variants and seeds, compared with BF16; and `Advice` on FP8."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch_fp8.quantization.wording import by_reason, first_of
from torch_fp8_tools.compare.trial_record import (
    Difference,
    TrialRecord,
    difference,
    is_diverged,
    steps_to_equal_loss,
)
from torch_fp8_tools.compare.trials import INTERRUPTED

_SAME_WEIGHTS = 1e-3


@dataclass
class VariantOutcome:
    """A variant's figures, over all seeds that ran.

    Attributes:
        name: name of the variant.
        error: error of the first trial that failed, or None if none did.
        tail: last lines of that trial's program.
        steps: number of optimizer steps of the shortest trial.
        step_seconds: median seconds of a step.
        tokens_per_second: tokens of all ranks, or None if the program shows none.
        peaks: peak bytes of each rank.
        loss: mean loss of the last half of the steps.
        difference: relative difference of the loss from BF16's.
        equal_steps: number of steps to BF16's last loss.
        flops: share of the matmul FLOPs in FP8.
        layers: (number in FP8, number of all).
        skipped: names of the layers in BF16, by reason.
        profile: shares of the time.
        loading: share of the time that DataLoaders take.
        warm_up_seconds: seconds of the first steps and of compilation.
        recompilations: number of graphs compiled after the first steps.
        evaluations: last held-out losses, by name.
        config: configuration of the first model, as JSON.
        diverged: whether a loss was not finite.
        alarms: alarms of the monitor.
        records: the trials.
    """

    name: str
    records: list[TrialRecord]
    error: str | None = None
    tail: list[str] = field(default_factory=list)
    steps: int = 0
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    peaks: list[int] = field(default_factory=list)
    loss: float | None = None
    difference: Difference | None = None
    equal_steps: float | None = None
    flops: float = 0.0
    layers: tuple[int, int] = (0, 0)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    profile: dict[str, float] = field(default_factory=dict)
    loading: float = 0.0
    warm_up_seconds: float = 0.0
    recompilations: int = 0
    evaluations: dict[str, float] = field(default_factory=dict)
    config: str | None = None
    diverged: bool = False
    alarms: list[str] = field(default_factory=list)

    @property
    def is_bf16(self) -> bool:
        return self.records[0].trial.is_bf16

    @property
    def peak(self) -> int | None:
        return max(self.peaks, default=None)

    def equal_seconds(self) -> float | None:
        """Seconds of training to BF16's last loss, without the warm-up."""
        steps = self.steps if self.is_bf16 else self.equal_steps
        return None if steps is None or self.step_seconds is None else steps * self.step_seconds


@dataclass
class Outcome:
    """The variants, BF16 first, with the noise between BF16 trials and notes on the trials.

    Attributes:
        noise: difference of the repeated BF16 trial, or None if it did not run.
        repeats: whether the repeated trial had the same losses.
        device: "cpu" or "cuda".
        card: name of the card.
        ranks: number of ranks.
        notes: lines on what differs from the user's run.
    """

    variants: list[VariantOutcome]
    noise: Difference | None
    repeats: bool | None
    device: str
    card: str | None
    ranks: int
    notes: list[str]


def outcome(records: Sequence[TrialRecord]) -> Outcome:
    """Compare the trials that ran, those of BF16 first."""
    again = [r for r in records if r.trial.is_repeat]
    names = dict.fromkeys(r.trial.variant for r in records)
    by_name = {
        name: [r for r in records if r.trial.variant == name and not r.trial.is_repeat]
        for name in names
    }
    variants = [_variant(name, trials) for name, trials in by_name.items() if trials]
    reference = variants[0]
    for variant in variants[1:]:
        _compare(reference, variant)
    noise, repeats = None, None
    usable = [r for r in again if r.losses and r.error is None]
    if usable and reference.records[0].losses:
        base = reference.records[0].losses
        noise = difference([base], [usable[0].losses])
        repeats = all(base.get(step) == loss for step, loss in usable[0].losses.items())
    facts = next((r.facts for r in records if r.facts), {})
    notes = [(note, v.name) for v in variants for r in v.records for note in r.notes]
    return Outcome(
        variants,
        noise,
        repeats,
        facts.get("device", "cpu"),
        facts.get("card"),
        facts.get("world", 1),
        [*_starts(reference, variants[1:]), *_equal_seeds(reference), *_grouped(notes)],
    )


def _variant(name: str, records: list[TrialRecord]) -> VariantOutcome:
    failed = next((r for r in records if r.error is not None), None)
    result = VariantOutcome(name, records)
    if failed is not None:
        result.error, result.tail = failed.error, list(failed.result.get("tail", []))
    ran = [r for r in records if r.rows]
    if not ran:
        return result
    result.steps = min(r.rows[-1]["step"] for r in ran)
    times = [r.step_seconds for r in ran if r.step_seconds is not None]
    result.step_seconds = statistics.median(times)
    tokens = statistics.fmean(r.tokens_of_ranks for r in ran)
    result.tokens_per_second = tokens / result.step_seconds if tokens else None
    result.peaks = [max(peaks) for peaks in zip(*(r.peaks for r in ran), strict=False)]
    losses = [loss for r in ran for step, loss in r.losses.items() if 2 * step > len(r.losses)]
    result.loss = statistics.fmean(losses) if losses else None
    result.alarms = [alarm for r in ran for alarm in r.alarms]
    result.diverged = any(is_diverged(r.losses) for r in ran)
    profiles = [r.profile for r in ran if r.profile]
    result.profile = profiles[0] if profiles else {}
    result.loading = statistics.fmean(r.loading_share for r in ran)
    result.warm_up_seconds = statistics.fmean(r.warm_up_seconds for r in ran)
    result.recompilations = max(r.recompilations for r in ran)
    if ran[0].evaluations:
        result.evaluations = ran[0].evaluations[-1][1]
    layers = ran[0].facts.get("layers", [])
    if layers:
        result.layers = (sum(x["converted"] for x in layers), sum(x["layers"] for x in layers))
        total = sum(x["flops"] for x in layers)
        result.flops = sum(x["fp8_flops"] for x in layers) / total if total else 0.0
        skipped = {name: reason for x in layers for name, reason in x["skipped"]}
        result.skipped = by_reason(skipped.items())
        result.config = layers[0]["config"]
    return result


def _compare(reference: VariantOutcome, variant: VariantOutcome) -> None:
    seeds = {r.trial.seed: r.losses for r in reference.records}
    pairs = [(seeds[r.trial.seed], r.losses) for r in variant.records if r.trial.seed in seeds]
    bases, others = [base for base, _ in pairs], [other for _, other in pairs]
    variant.difference = difference(bases, others)
    variant.equal_steps = steps_to_equal_loss(bases, others)


def _starts(reference: VariantOutcome, variants: Sequence[VariantOutcome]) -> list[str]:
    """Return lines on trials that start from other weights, or read other data, than BF16's."""
    lines = []
    for variant in variants:
        for base, record in zip(reference.records, variant.records, strict=False):
            first, second = base.facts.get("weights"), record.facts.get("weights")
            if first and second and abs(second / first - 1) > _SAME_WEIGHTS:
                lines.append(
                    f"{variant.name} starts from different weights than BF16 "
                    f"({100 * (second / first - 1):+.2f} % in the sum of their absolute values): "
                    "the program makes them before its seed is set, so the losses differ by chance"
                )
            count = min(len(base.fingerprints), len(record.fingerprints))
            if base.fingerprints[:count] != record.fingerprints[:count]:
                lines.append(
                    f"{variant.name} reads different batches than BF16: the seed does not set the "
                    "order of the data, so the losses differ by chance"
                )
    return list(dict.fromkeys(lines))


def _equal_seeds(reference: VariantOutcome) -> list[str]:
    """Return a line on seeds that start like the first one, and so add no evidence."""
    starts = [(r.trial.seed, r.facts.get("weights"), r.fingerprints) for r in reference.records]
    equal = [seed for seed, *start in starts[1:] if start[1] and start == list(starts[0][1:])]
    if not equal:
        return []
    return [
        f"the weights and batches of --seeds {first_of(equal)} are those of 0: the program sets "
        "its seeds where the command does not reach, so these trials show no more than one does"
    ]


def _grouped(notes: Sequence[tuple[str, str]]) -> list[str]:
    """Return notes once, with the variants in which they were taken."""
    groups: dict[str, dict[str, None]] = {}
    for text, name in notes:
        groups.setdefault(text, {})[name] = None
    return [f"{text} ({', '.join(names)})" for text, names in groups.items()]


FASTER, LESS_MEMORY, WORSE = 1.03, 0.95, 0.005
"""A variant counts as faster with at least this speedup, as smaller with at most this share of
BF16's memory, and as worse if its loss is certainly higher by more than this share."""
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
