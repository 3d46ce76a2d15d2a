"""The outcome of a comparison as text, as JSON, as rows of CSV files, and as a picture."""

import csv
import importlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch_fp8.quantization.wording import aligned, counted, first_of
from torch_fp8_tools.compare.outcome import Advice, Outcome, VariantOutcome, speedup

_MIB = 2**20
_MOST_NOTES = 12
EMULATED = (
    "On a CPU, FP8 is emulated: the times show nothing about a GPU. Losses and memory are valid."
)
FAST_CPU = "BF16 products were computed in float32 and rounded once, in all variants (--fast-cpu)."


def as_text(result: Outcome, advice: Advice, fast_cpu: bool) -> str:
    """Return the table, what did not run in FP8, where the time went, notes and the advice."""
    reference = result.variants[0]
    sections = [
        aligned([_HEAD, *(_cells(reference, v) for v in result.variants)]),
        "\n".join(line for v in result.variants for line in _failure(v)),
        "\n".join(line for v in result.variants[1:] for line in _layers(v)),
        _times(result.variants),
        "\n".join(_facts(result, fast_cpu)),
        _notes(result.notes),
        advice.sentence,
    ]
    return "\n\n".join(filter(None, sections))


_HEAD = (
    *("variant", "steps", "s/step", "speed", "tokens/s", "peak MiB", "memory", "loss"),
    *("loss vs BF16", "time to equal loss", "FLOPs in FP8"),
)


def _cells(reference: VariantOutcome, variant: VariantOutcome) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    is_first = variant is reference
    times = variant.equal_seconds(), reference.equal_seconds()
    equal = times[0] / times[1] if times[0] and times[1] else None
    share = variant.peak / reference.peak if variant.peak and reference.peak else None
    return (
        variant.name,
        str(variant.steps),
        text(variant.step_seconds, "{:.4g}"),
        "" if is_first or not variant.steps else f"{speedup(reference, variant):.2f}x",
        text(variant.tokens_per_second, "{:,.0f}"),
        text(variant.peak and variant.peak / _MIB, "{:,.1f}"),
        "" if is_first else text(share, "{:.2f}x"),
        "not finite" if variant.diverged else text(variant.loss, "{:.4f}"),
        "" if variant.difference is None else str(variant.difference),
        "" if is_first else text(equal, "{:.2f}x"),
        "" if is_first or not variant.steps else f"{100 * variant.flops:.0f} %",
    )


def _failure(variant: VariantOutcome) -> list[str]:
    if variant.error is None:
        return []
    lines = [f"{variant.name} failed: {variant.error}"]
    if variant.tail:
        lines += ["The last lines of the program:", *(f"  | {line}" for line in variant.tail)]
    return lines


def _layers(variant: VariantOutcome) -> list[str]:
    if not variant.layers[1]:
        return []
    count, total = variant.layers
    lines = [f"{variant.name}: {count} of {counted(total, 'linear layer')} in FP8"]
    for reason, names in variant.skipped.items():
        lines.append(f"  in BF16: {first_of(names)}: {reason}")
    if variant.alarms:
        number = counted(len(variant.alarms), "alarm")
        lines.append(f"  {number} of the monitor: {first_of(variant.alarms, 1, '; ')}")
    return lines


def _times(variants: Sequence[VariantOutcome]) -> str:
    profiled = [v for v in variants if v.profile]
    parts = dict.fromkeys(part for v in profiled for part in v.profile)
    if not parts:
        return ""
    rows = [("where the time goes", *parts)]
    rows += [(v.name, *(f"{100 * v.profile.get(p, 0.0):.0f} %" for p in parts)) for v in profiled]
    return aligned(rows)


def _facts(result: Outcome, fast_cpu: bool) -> list[str]:
    if not any(variant.steps for variant in result.variants):
        return []
    lines = [
        "warm-up and compilation, not in the median: "
        + ", ".join(
            f"{v.name} {v.warm_up_seconds:.1f} s"
            + (f" ({counted(v.recompilations, 'graph')} later)" if v.recompilations else "")
            for v in result.variants
            if v.steps
        )
    ]
    for name in dict.fromkeys(n for v in result.variants for n in v.evaluations):
        values = [f"{v.name} {v.evaluations[name]:.4f}" for v in result.variants if v.evaluations]
        lines.append(f"{name}, held out: {', '.join(values)}")
    if result.repeats:
        lines.append("BF16 run twice gives the same losses.")
    elif result.noise is not None:
        lines.append(
            f"The program is not deterministic: BF16 run twice differs by {result.noise}. A "
            "smaller difference between variants says nothing."
        )
    count = max((r.count for v in result.variants for r in v.records), default=0)
    if 0 < count < result.ranks:
        lines.append(
            f"These are {count} of {result.ranks} ranks: each machine reports its own, and the "
            "losses and memory of the others are not included."
        )
    if result.ranks > 1:
        peaks = {v.name: [f"{p / _MIB:,.1f}" for p in v.peaks] for v in result.variants}
        lines += [f"{name}, peak MiB by rank: {', '.join(p)}" for name, p in peaks.items() if p]
    if result.device == "cpu":
        lines.append(EMULATED)
    return [*lines, FAST_CPU] if fast_cpu else lines


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    shown = [f"  {note}" for note in notes[:_MOST_NOTES]]
    more = len(notes) - _MOST_NOTES
    return "\n".join(
        ["What the trials did otherwise:", *shown, *([f"  and {more} more"] if more > 0 else [])]
    )


def as_json(result: Outcome, advice: Advice, command: Sequence[str], fast_cpu: bool) -> Any:
    """Return the outcome as values for a JSON file."""
    reference = result.variants[0]
    return {
        "command": list(command),
        "device": result.device,
        "card": result.card,
        "ranks": result.ranks,
        "fast_cpu": fast_cpu,
        "advice": advice.sentence,
        "advised": None if advice.variant is None else advice.variant.name,
        "noise": None if result.noise is None else list(result.noise),
        "bf16_repeats": result.repeats,
        "notes": result.notes,
        "variants": [_values(reference, variant) for variant in result.variants],
    }


def _values(reference: VariantOutcome, variant: VariantOutcome) -> dict[str, Any]:
    apart = variant.difference
    return {
        "variant": variant.name,
        "error": variant.error,
        "steps": variant.steps,
        "step_seconds": variant.step_seconds,
        "speedup": speedup(reference, variant) or None,
        "tokens_per_second": variant.tokens_per_second,
        "peak_bytes": variant.peak,
        "peak_bytes_by_rank": variant.peaks,
        "loss": variant.loss,
        "loss_difference": None if apart is None else apart.mean,
        "loss_difference_error": None if apart is None else apart.error,
        "seconds_to_equal_loss": variant.equal_seconds(),
        "fp8_flops_share": variant.flops,
        "fp8_layers": variant.layers[0],
        "layers": variant.layers[1],
        "in_bf16": variant.skipped,
        "time_shares": variant.profile,
        "data_loading_share": variant.loading,
        "warm_up_seconds": variant.warm_up_seconds,
        "recompilations": variant.recompilations,
        "alarms": variant.alarms,
        "held_out": variant.evaluations,
    }


def summary_csv(result: Outcome) -> str:
    """Return a row for each variant."""
    rows = [_values(result.variants[0], variant) for variant in result.variants]
    flat = [k for k, v in rows[0].items() if not isinstance(v, (dict, list))]
    return _csv(flat, [[row[key] for key in flat] for row in rows])


def steps_csv(result: Outcome) -> str:
    """Return a row for each optimizer step of each trial: loss and seconds."""
    rows = [
        [v.name, r.trial.seed, row["step"], r.losses.get(row["step"]), row["seconds"]]
        for v in result.variants
        for r in v.records
        for row in r.rows
    ]
    return _csv(["variant", "seed", "step", "loss", "seconds"], rows)


def _csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return file.getvalue()


_INK, _COLOURS = "#1f2933", ("#1f2933", "#2f6fde", "#2d9d78", "#d64545", "#8a4fd3", "#c05621")
_DPI = 130


def draw(result: Outcome, advice: Advice, title: str) -> bytes:
    """Draw a comparison as a PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"torch-fp8 compare needs matplotlib for its picture: pip install matplotlib ({error})"
        ) from error
    figure = module.Figure(figsize=(12, 6.4), facecolor="white", layout="constrained")
    axes = figure.subplot_mosaic(
        [["loss", "time", "memory"], ["apart", "time", "memory"]], width_ratios=(2.4, 1, 1)
    )
    ran = [variant for variant in result.variants if variant.steps]
    colours = dict(zip((v.name for v in ran), _COLOURS * len(ran), strict=False))
    for variant in ran:
        style = "-" if variant.is_bf16 else "--"
        colour = colours[variant.name]
        for i, record in enumerate(variant.records):
            label = variant.name if i == 0 else "_"
            steps = list(record.losses)
            axes["loss"].plot(steps, list(record.losses.values()), color=colour, alpha=0.15)
            axes["loss"].plot(*smoothed(record.losses), style, color=colour, label=label)
        if not variant.is_bf16:
            _draw_difference(axes["apart"], result.variants[0], variant, colour)
    axes["loss"].set(ylabel="loss")
    if ran:
        axes["loss"].legend(frameon=False)
    axes["apart"].axhline(0.0, color=_INK, linewidth=0.8)
    axes["apart"].set(xlabel="optimizer step", ylabel="loss vs BF16, %")
    is_emulated = result.device == "cpu"
    times = {v.name: (v.step_seconds or 0.0) * 1e3 for v in ran}
    words = "step, ms (FP8 emulated)" if is_emulated else "step, ms"
    most = max(times.values(), default=0.0)
    _bars(axes["time"], times, colours, words, "{:,.0f}" if most >= 100 else "{:.3g}")
    peaks = {v.name: (v.peak or 0) / _MIB for v in ran}
    _bars(axes["memory"], peaks, colours, "peak memory, MiB", "{:,.0f}")
    where = result.card or "a CPU"
    figure.suptitle(f"{title}, on {where}", fontsize=11, color=_INK)
    figure.supxlabel(advice.sentence, fontsize=9, color=_INK, wrap=True)
    file = io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png")
    return file.getvalue()


def smoothed(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return centred means over about a twentieth of the steps."""
    steps = sorted(losses)
    half = max(1, len(steps) // 40)
    means = []
    for i in range(len(steps)):
        near = [losses[s] for s in steps[max(0, i - half) : i + half + 1]]
        means.append(sum(near) / len(near))
    return steps, means


def _draw_difference(
    axes: Any, first: VariantOutcome, variant: VariantOutcome, colour: str
) -> None:
    for base, record in zip(first.records, variant.records, strict=False):
        apart = {
            step: 100 * (loss / base.losses[step] - 1)
            for step, loss in record.losses.items()
            if base.losses.get(step)
        }
        axes.plot(*smoothed(apart), "--", color=colour)


def _bars(
    axes: Any, values: Mapping[str, float], colours: Mapping[str, str], title: str, form: str
) -> None:
    bars = axes.bar(list(values), list(values.values()), color=[colours[n] for n in values])
    axes.bar_label(bars, [form.format(v) if v else "" for v in values.values()])
    axes.set_title(title, fontsize=9.5)
    axes.tick_params(axis="x", rotation=30)
    axes.spines[["top", "right"]].set_visible(False)
