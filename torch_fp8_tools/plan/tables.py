"""Plans as text: one as a table of its levels, several as tables over the number of GPUs."""

from collections.abc import Sequence
from typing import Any

from torch_fp8.config import FP8Config
from torch_fp8.quantization.wording import aligned
from torch_fp8_tools.plan.plan import CATEGORIES, LevelPlan, Plan
from torch_fp8_tools.plan.setup import BF16, Setup

_GIB = 2**30
_DEFAULT = FP8Config().opt_level
_EQUAL = 1.01
"""The factor up to which estimated seconds count as equal to the lowest."""


def plain_text(plan: Plan) -> str:
    """Format a plan as text of at most 80 columns."""
    return "\n".join([headline(plan), "", aligned(lines_of(plan)), "", *notes(plan), ""])


def headline(plan: Plan) -> str:
    """Describe the planned run in a few words."""
    setup = plan.setup
    degrees = {
        "data": setup.data,
        "FSDP": setup.fsdp,
        "tensor": setup.tensor,
        "pipeline": setup.pipeline,
    }
    ways = " x ".join(f"{name} {n}" for name, n in degrees.items() if n > 1)
    many = f"{setup.gpus} x {setup.card.name}, {setup.memory:g} GiB each"
    return (
        f"{setup.name}, {plan.num_params / 1e9:.2f} billion parameters, {what(setup)}\n"
        f"{many}{f' ({ways})' if ways else ''}; {setup.micro_batch} x {setup.sequence} tokens"
        f"{f' x {setup.accumulate} micro-batches' if setup.accumulate > 1 else ''}"
        f"{', activation checkpointing' if setup.checkpointing else ''}; {setup.recipe}"
    )


def what(setup: Setup) -> str:
    """Describe the trained model."""
    if setup.method == "lora":
        return f"LoRA of rank {setup.rank}"
    if setup.method == "rlhf":
        return f"RLHF ({', '.join(setup.roles)})"
    return "full training"


def lines_of(plan: Plan) -> list[list[str]]:
    """Return the rows of the table: a category, and a cell for each level."""
    levels = plan.levels.values()
    names = [n for n in CATEGORIES if any(level.bytes[n] for level in levels)]
    rows = [["GiB per GPU", *plan.levels]]
    for name in (*names, "activations", "total"):
        rows.append([name, *(gib(level.bytes[name]) for level in levels)])
    rows.append(["peak", *(gib(level.peak) for level in levels)])
    rows.append(["fits", *(_fits(level) for level in levels)])
    rows.append(["wire a step", *(gib(level.wire) for level in levels)])
    rows.append(["seconds a step", *(f"{level.seconds:.3f}" for level in levels)])
    base = plan.levels.get(BF16)
    if base is not None and len(plan.levels) > 1:
        rows.append(["speed", *(f"{base.seconds / level.seconds:.2f}x" for level in levels)])
    return rows


def notes(plan: Plan) -> list[str]:
    """Return notes on the numbers, and on which configuration to copy."""
    lines = [
        "Bytes are counted by the training code; activations are all tensors that live",
        "within a step. The total is the sum; the peak is the most held at one time.",
        "Seconds are estimates from data sheets, not measured on any card.",
    ]
    if plan.experts:
        lines += ["", f"{plan.experts}."]
    name, why = advice(plan)
    if name:
        lines += ["", f"{name}: {why}.", f"To copy: TORCH_FP8_CONFIG='{plan.levels[name].config}'"]
    elif not plan.fits:
        checkpointing = "" if plan.setup.checkpointing else "--checkpointing, "
        lines += ["", f"Nothing fits: more GPUs, {checkpointing}--tensor, or a shorter --sequence."]
    return lines


def advice(plan: Plan) -> tuple[str, str]:
    """Return the recommended level and the reason; two empty strings if none fits."""
    fitting = {name: level for name, level in plan.levels.items() if level.config and level.fits}
    if not fitting:
        return "", ""
    least = min(level.seconds for level in fitting.values())
    equal = [name for name, level in fitting.items() if level.seconds <= _EQUAL * least]
    if _DEFAULT not in equal:
        return equal[0], "the fastest level that fits"
    others = " and ".join(name for name in equal if name != _DEFAULT)
    why = f"as fast as {others}, and the default" if others else "the fastest level that fits"
    return _DEFAULT, why


def gib(num_bytes: float) -> str:
    """Format bytes in GiB."""
    return f"{num_bytes / _GIB:.2f}"


def _fits(level: LevelPlan) -> str:
    word = "yes" if level.fits else "NO"
    return f"{word} ({level.headroom / _GIB:+.1f})"


def scaling_text(plans: Sequence[Plan]) -> str:
    """Format plans as three tables of at most 80 columns: memory, network traffic, seconds.

    ``tokens/s`` is for all GPUs at the fastest level that fits; ``of linear`` compares this number
    per GPU with the first row's.
    """
    setup = plans[0].setup
    head = (
        f"{setup.name}, {plans[0].num_params / 1e9:.2f} billion parameters, {what(setup)}\n"
        f"{setup.card.name}, {setup.memory:g} GiB each; {setup.micro_batch} x {setup.sequence} "
        f"tokens on each; {setup.recipe}"
    )
    levels = list(plans[0].levels)
    tables = [
        ("peak GiB per GPU", lambda p: [_peak(level) for level in p.levels.values()]),
        ("wire GiB per GPU", lambda p: [gib(level.wire) for level in p.levels.values()]),
        ("seconds a step", lambda p: [f"{level.seconds:.3f}" for level in p.levels.values()]),
    ]
    parts = [head]
    for title, cells in tables:
        rows = [[title, *levels]]
        rows += [[_degrees(result), *cells(result)] for result in plans]
        parts.append(aligned(rows))
    rows = [["tokens/s", *levels, "of linear"]]
    first = _tokens_per_second(plans[0])
    for result in plans:
        speeds = _tokens_per_second(result)
        share = max(speeds) / max(first) * plans[0].setup.gpus / result.setup.gpus
        rows.append([_degrees(result), *(f"{speed:,.0f}" for speed in speeds), f"{share:.0%}"])
    parts.append(aligned(rows))
    parts.append(
        "Bytes are counted by the training code, on up to 64 ranks; larger rings are\ncalculated. "
        "Seconds are estimates from data sheets, not measured on any card."
    )
    return "\n\n".join(parts)


def _peak(level: Any) -> str:
    return gib(level.peak) + ("" if level.fits else " NO")


def _tokens_per_second(made: Plan) -> list[float]:
    setup = made.setup
    tokens = setup.tokens * setup.accumulate * setup.data * setup.fsdp
    return [tokens / level.seconds for level in made.levels.values()]


def _degrees(made: Plan) -> str:
    setup = made.setup
    ways = {"D": setup.data, "F": setup.fsdp, "T": setup.tensor, "P": setup.pipeline}
    named = " ".join(f"{name}{n}" for name, n in ways.items() if n > 1)
    return f"{setup.gpus:,} GPUs" + (f" ({named})" if len(named.split()) > 1 else "")
