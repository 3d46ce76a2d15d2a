"""Plans of one run on increasing numbers of GPUs: network traffic and seconds by level."""

from collections.abc import Sequence
from typing import Any

from torch_fp8.planner.counts import StepBytes
from torch_fp8.planner.plan import Plan, plan_beside
from torch_fp8.planner.tables import gib, what
from torch_fp8.quantization.wording import aligned


def scaling(model: Any, gpus: Sequence[int], **options: Any) -> list[Plan]:
    """Plan a run on each number of GPUs, with the same micro-batch on each GPU.

    Args:
        model: see `torch_fp8.plan`.
        gpus: the numbers of GPUs. FSDP2 shards over all of them, except for degrees that you give:
            ``fsdp=8`` makes a replica of every 8.
        options: see `torch_fp8.plan`.
    """
    counted: dict[tuple[str, str, int], StepBytes] = {}
    return [plan_beside(counted, model, gpus=number, **options) for number in gpus]


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
