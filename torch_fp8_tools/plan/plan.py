"""`plan`: memory and network traffic of a training run, for BF16 and each level.

``torch-fp8 plan`` prints a plan as JSON, or as a table of its levels with notes.
"""

import argparse
import dataclasses
import functools
import gc
import inspect
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_fp8.config import FP8Config
from torch_fp8.conversion.memory import CATEGORIES, MemoryReport
from torch_fp8.nn.layer_filter import expert_weights, experts_per_token
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.wording import aligned, check_choice, unknown_options
from torch_fp8_tools.plan.counts import standing_bytes, step_bytes, wire_bytes
from torch_fp8_tools.plan.followed_step import StepBytes
from torch_fp8_tools.plan.layouts import text_of
from torch_fp8_tools.plan.setup import BF16, LEVELS, Setup

_GIB = 2**30
_DEFAULT = FP8Config().opt_level

USABLE = 0.99
"""The share of a GPU's memory that programs can use: 79.2 GiB of an H100's 80."""
CONTEXT = 2**30
"""The bytes of CUDA's context, NCCL's buffers and cuBLAS's workspaces; an assumption."""
FRAGMENTS = 0.08
"""The allocator's overhead as a share of the counted peak; an assumption that no GPU has
measured.
"""


def left_of(memory: float, peak: float) -> float:
    """Return the bytes that a run with this counted peak leaves, negative if it does not fit."""
    return USABLE * memory - (1 + FRAGMENTS) * peak - CONTEXT


@dataclass(frozen=True)
class LevelPlan:
    """The memory and traffic of each GPU at one level.

    Attributes:
        bytes: bytes by category: those of `torch_fp8.MemoryReport`, ``activations`` (everything
            that exists only within a step: tensors saved for backward, gathered weights, logits and
            other workspace, at their peak), and ``total``, the sum of all.
        peak: the bytes at the moment of highest use. Less than the total, because activations are
            freed while gradients appear; equal to it if gradients persist between micro-batches.
        fits: whether `peak` and the GPU's own overhead fit into its memory.
        headroom: the bytes that are left (`left_of`); negative if the run does not fit.
        wire: the bytes that a GPU sends per optimizer step.
        config: the level's FP8Config as JSON, ready to copy, or empty for BF16.
    """

    bytes: dict[str, int]
    peak: int
    fits: bool
    headroom: int
    wire: int
    config: str


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        setup: the planned run.
        levels: the plan of each level, by ``bf16-mixed``, ``O1``, ``O2``, ``O3``.
        num_params: the number of parameters of the model, without adapters.
        experts: a text on the rows that each expert computes, or empty without experts.
    """

    setup: Setup
    levels: dict[str, LevelPlan]
    num_params: int
    experts: str = ""

    @property
    def fits(self) -> bool:
        """Whether at least one level fits."""
        return any(level.fits for level in self.levels.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as ``torch-fp8 plan --json`` prints them."""
        apart = ("config", "card", "recipe_is_auto", "layers")
        setup = {name: value for name, value in vars(self.setup).items() if name not in apart}
        levels = {name: dataclasses.asdict(level) for name, level in self.levels.items()}
        return {
            "model": self.setup.name,
            "parameters": self.num_params,
            "card": dataclasses.asdict(self.setup.card),
            "setup": setup,
            "experts": self.experts,
            "levels": levels,
        }

    def __str__(self) -> str:
        return plain_text(self)


def plan(model: Any, *, levels: Sequence[str] | str = LEVELS, **options: Any) -> Plan:
    """Plan the memory and network traffic of a training run, without a GPU.

    Weights, gradients and optimizer states are counted exactly: the real conversion runs on the
    real modules on the meta device, sharded by FSDP2 over the same number of ranks. Activations and
    network traffic are counted in a step on tensors without memory.

    Args:
        model: a preset (``llama-3.1-8b``, ...), a ``config.json`` or a folder that contains one, or
            a transformers configuration.
        levels: some of ``bf16-mixed``, ``O1``, ``O2``, ``O3``.
        **options: the cluster and the run:

            * ``gpus``: number of GPUs. Default: 1.
            * ``card``: ``h100``, ``h200``, ``b200``, ``l40s``, ``rtx-4090``. Default: ``"h100"``.
            * ``memory``: GiB of each GPU, or None for the card's.
            * ``sequence``: tokens of a sequence, or None for the model's longest, at most 4096.
            * ``micro_batch``: sequences in one forward of a GPU. Default: 1.
            * ``accumulate``: micro-batches in an optimizer step. Default: 1.
            * ``data``, ``fsdp``, ``tensor``: the degrees of replication, FSDP2 sharding and tensor
              parallelism; their product is ``gpus``. By default ``fsdp`` is what the others leave,
              and ``data`` what a given ``fsdp`` leaves, else 1.
            * ``recipe``: FP8 recipe. Default: ``auto``, planned as tensorwise, because ``auto``
              needs a GPU to measure.
            * ``checkpointing``: whether layers use activation checkpointing. Default: False.
            * ``method``: ``full``; ``lora``, with adapters of ``rank`` on all linear layers.
              Default: ``"full"``.
    Returns:
        The plan, with a `LevelPlan` for each level; ``print`` shows it as a table.
    Raises:
        ValueError: the model cannot be read or states no sizes; degrees do not divide; a card,
            level, recipe or method is unknown; this process is in a process group.
        TypeError: a size is not a number, or an option is unknown.
        ImportError: transformers, or peft for ``lora``, is missing.
    """
    check_arguments(plan, locals())
    if isinstance(levels, str):
        levels = (levels,)
    for level in levels or ("",):
        check_choice("levels", level, LEVELS)
    known = [name for name in inspect.signature(Setup).parameters if name != "model"]
    if unknown := unknown_options(options, known, "plan()"):
        raise TypeError(unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own names
        return plan_setup(Setup(model, **options), levels, {})


def plan_setup(setup: Setup, levels: Sequence[str], counted: dict[str, StepBytes]) -> Plan:
    """Plan a checked run.

    Args:
        setup: the run.
        levels: some of `torch_fp8_tools.plan.setup.LEVELS`.
        counted: steps that are counted already, by level; this plan adds its own.
    """
    if setup.fsdp > 1 and setup.layers.share:
        raise ValueError(
            f"layers of {type(setup.config).__name__} share parameters, which FSDP2 cannot shard "
            "layer by layer: use fsdp=1, with data for several GPUs"
        )
    report = functools.cache(functools.partial(standing_bytes, setup))
    plans = {level: _plan_level(setup, level, counted, report) for level in levels}
    num_params = sum(p.numel() for p in setup.layers.whole.parameters())
    return Plan(setup, plans, num_params, _rows_of_experts(setup))


def _rows_of_experts(setup: Setup) -> str:
    """Describe how many rows each expert computes in a micro-batch, or return an empty string."""
    top_k = experts_per_token(text_of(setup.config))
    for module in setup.layers.whole.modules():
        for name in expert_weights("", module):
            num_experts = len(module.get_parameter(name))
            rows = setup.tokens * (top_k or num_experts) / num_experts
            return f"experts: {rows:.0f} rows each of {num_experts} experts"
    return ""


def _plan_level(
    setup: Setup,
    level: str,
    counted: dict[str, StepBytes],
    report: Callable[[str], MemoryReport],
) -> LevelPlan:
    """Plan a level; the counts of steps, and the reports of what persists, are reused."""
    same = "O2" if level == "O3" else level  # O3 only differs in its 8-bit gradients
    if same not in counted:
        counted[same] = step_bytes(setup, same)
    step = counted[same]
    parts = {name: getattr(report(level), name) for name in CATEGORIES}
    # Gradients count in BF16, not in 8 bits, because steps are counted so.
    plain = report(same)
    without_gradients = plain.total - plain.gradients
    backward = step.backward + sum(parts.values()) - without_gradients - plain.gradients
    total = sum(parts.values()) + step.forward
    # Gradients persist between micro-batches, or in DDP's buckets.
    persist = setup.accumulate > 1 or (setup.data > 1 and setup.fsdp == 1)
    peak = total if persist else without_gradients + max(step.forward, backward)
    memory = setup.memory * 2**30
    exchanged = report(BF16).gradients / 4 if setup.data > 1 else 0.0  # elements
    wire = wire_bytes(setup, exchanged, step, level)
    config = {"opt_level": level} | ({} if setup.recipe_is_auto else {"recipe": setup.recipe})
    return LevelPlan(
        bytes={**parts, "activations": round(step.forward), "total": round(total)},
        peak=round(peak),
        fits=left_of(memory, peak) >= 0,
        headroom=round(left_of(memory, peak)),
        wire=round(wire),
        config="" if level == BF16 else json.dumps(config),
    )


def plain_text(plan: Plan) -> str:
    """Format a plan as text of at most 80 columns."""
    return "\n".join([headline(plan), "", aligned(lines_of(plan)), "", *notes(plan), ""])


def headline(plan: Plan) -> str:
    """Describe the planned run in a few words."""
    setup = plan.setup
    degrees = setup.data, setup.fsdp, setup.tensor
    names = "data", "FSDP", "tensor"
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
    """Return notes on the numbers, and the configuration to copy."""
    lines = [
        "Bytes are counted by the training code; activations are all tensors that live",
        "within a step. The total is the sum; the peak is the most held at one time.",
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
        result = plan(options.model, levels=levels, gpus=options.gpus[0], **given)
    finally:
        if collects:
            gc.enable()
    if options.json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        print(result, end="")
    return 0 if result.fits else 1
