"""``torch-fp8 plan``: plan a run and print it as JSON, or as a table of its levels with notes."""

import argparse
import gc
import inspect
import json

from torch_fp8.config import FP8Config
from torch_fp8.quantization.wording import aligned
from torch_fp8_tools.plan import plan as planner
from torch_fp8_tools.plan.plan import CATEGORIES, LevelPlan, Plan
from torch_fp8_tools.plan.setup import LEVELS, Setup

_GIB = 2**30
_DEFAULT = FP8Config().opt_level


def run(options: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit status."""
    if len(options.gpus) > 1:
        raise ValueError(
            "--gpus no longer takes several numbers: plan one after the other, such as --gpus "
            f"{options.gpus[0]}"
        )
    names = inspect.signature(Setup).parameters.keys() - {"model", "gpus"}
    given = {name: getattr(options, name) for name in names}
    levels, collects = tuple(options.level or LEVELS), gc.isenabled()
    gc.disable()  # what a step saves for backward is freed without it
    try:
        result = planner.plan(options.model, levels=levels, gpus=options.gpus[0], **given)
    finally:
        if collects:
            gc.enable()
    if options.json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        print(result, end="")
    return 0 if result.fits else 1


def plain_text(plan: Plan) -> str:
    """Format a plan as text of at most 80 columns."""
    return "\n".join([headline(plan), "", aligned(lines_of(plan)), "", *notes(plan), ""])


def headline(plan: Plan) -> str:
    """Describe the planned run in a few words."""
    setup = plan.setup
    degrees = setup.data, setup.fsdp, setup.tensor, setup.pipeline
    names = "data", "FSDP", "tensor", "pipeline"
    ways = " x ".join(f"{name} {n}" for name, n in zip(names, degrees, strict=True) if n > 1)
    trained = f"LoRA of rank {setup.rank}" if setup.method == "lora" else "full training"
    many = f"{setup.gpus} x {setup.card.name}, {setup.memory:g} GiB each"
    return (
        f"{setup.name}, {plan.num_params / 1e9:.2f} billion parameters, {trained}\n"
        f"{many}{f' ({ways})' if ways else ''}; {setup.micro_batch} x {setup.sequence} tokens"
        f"{f' x {setup.accumulate} micro-batches' if setup.accumulate > 1 else ''}"
        f"{', activation checkpointing' if setup.checkpointing else ''}; {setup.recipe}"
    )


def lines_of(plan: Plan) -> list[list[str]]:
    """Return the rows of the table: a category, and a cell for each level."""
    levels = plan.levels.values()
    names = [n for n in CATEGORIES if any(level.bytes[n] for level in levels)]
    parts = (*names, "activations", "total")
    return [
        ["GiB per GPU", *plan.levels],
        *([name, *(gib(level.bytes[name]) for level in levels)] for name in parts),
        ["peak", *(gib(level.peak) for level in levels)],
        ["fits", *(_fits(level) for level in levels)],
        ["wire a step", *(gib(level.wire) for level in levels)],
    ]


def notes(plan: Plan) -> list[str]:
    """Return notes on the numbers, and on which configuration to copy."""
    lines = [
        "Bytes are counted by the training code; activations are all tensors that live",
        "within a step. The total is the sum; the peak is the most held at one time.",
    ]
    if plan.lengths:
        lines += [
            "Layers loop over tokens in Python, so activations are extrapolated from steps of",
            f"{', '.join(map(str, plan.lengths))} tokens.",
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
    if _DEFAULT in fitting:
        return _DEFAULT, "the default, and it fits"
    least = min(fitting, key=lambda name: fitting[name].peak)
    return least, "of the levels that fit, the one with the lowest peak"


def gib(num_bytes: float) -> str:
    """Format bytes in GiB."""
    return f"{num_bytes / _GIB:.2f}"


def _fits(level: LevelPlan) -> str:
    return f"{'yes' if level.fits else 'NO'} ({level.headroom / _GIB:+.1f})"
