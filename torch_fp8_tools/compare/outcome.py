"""`Outcome`: the trials of all variants and seeds, compared with BF16."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_fp8.quantization.wording import by_reason, first_of
from torch_fp8_tools.compare.statistics import (
    Difference,
    difference,
    is_diverged,
    steps_to_equal_loss,
)
from torch_fp8_tools.compare.trial_record import TrialRecord

_SAME_WEIGHTS = 1e-3


@dataclass
class VariantOutcome:
    """A variant's figures, over all seeds that ran.

    Attributes:
        name: name of the variant.
        error: error of the first trial that failed; None if none did.
        tail: last lines of that trial's program.
        steps: number of optimizer steps of the shortest trial.
        step_seconds: median seconds of a step.
        tokens_per_second: tokens of all ranks; None if the program shows none.
        peaks: peak bytes of each rank.
        loss: mean loss of the last half of the steps.
        difference: relative difference of the loss to BF16.
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
    """The variants, BF16 first, and what the repeated BF16 trial and the starts show.

    Attributes:
        noise: difference of the repeated BF16 trial; None if it did not run.
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
    """Return lines on trials that begin with other weights, or read other data, than BF16."""
    lines = []
    for variant in variants:
        for base, record in zip(reference.records, variant.records, strict=False):
            first, second = base.facts.get("weights"), record.facts.get("weights")
            if first and second and abs(second / first - 1) > _SAME_WEIGHTS:
                lines.append(
                    f"{variant.name} begins with other weights than BF16 "
                    f"({100 * (second / first - 1):+.2f} % in the sum of their absolute values): "
                    "the program makes them before its seed is set, so the losses differ by chance"
                )
            count = min(len(base.fingerprints), len(record.fingerprints))
            if base.fingerprints[:count] != record.fingerprints[:count]:
                lines.append(
                    f"{variant.name} reads other batches than BF16: the order of the data is not "
                    "that of a seed, so the losses differ by chance"
                )
    return list(dict.fromkeys(lines))


def _equal_seeds(reference: VariantOutcome) -> list[str]:
    """Return a line on seeds that begin as the first one does, and so are no further evidence."""
    starts = [(r.trial.seed, r.facts.get("weights"), r.fingerprints) for r in reference.records]
    equal = [seed for seed, *start in starts[1:] if start[1] and start == list(starts[0][1:])]
    if not equal:
        return []
    return [
        f"the weights and batches of --seeds {first_of(equal)} are those of 0: the program sets "
        "its seeds where the command does not reach, so these trials say no more than one"
    ]


def _grouped(notes: Sequence[tuple[str, str]]) -> list[str]:
    """Return notes once, with the variants in which they were taken."""
    groups: dict[str, dict[str, None]] = {}
    for text, name in notes:
        groups.setdefault(text, {})[name] = None
    return [f"{text} ({', '.join(names)})" for text, names in groups.items()]
