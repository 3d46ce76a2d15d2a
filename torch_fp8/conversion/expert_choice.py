"""Recipe ``auto`` for fused experts: FP8, or BF16 if FP8 does not pay.

`torch_fp8.conversion.expert_benchmark` times a training pass of each distinct block of experts in
FP8 and by transformers in BF16, with the rows that an expert gets from ``FP8Config.tokens``
tokens. Casting a weight costs the same for few rows as for many, so small experts need many tokens.
A block that is less than `LEAST_SPEEDUP` times as fast in FP8 stays in BF16. Experts with adapters
always run in FP8, without a measurement: their weights are stored as FP8 only, and no other
function multiplies by the adapters' factors. Ranks agree on the times as for linear layers
(`torch_fp8.conversion.autotune`).
"""

from collections.abc import Mapping

import torch
from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.autotune import NO_EXPERTS, ExpertChoice, agreed_times
from torch_fp8.conversion.expert_benchmark import (
    ExpertShape,
    ExpertTimes,
    expert_shape,
    expert_times,
)
from torch_fp8.conversion.layer_benchmark import Card
from torch_fp8.distributed.agreement import can_ask
from torch_fp8.ops.scaled_grouped_mm import grouped_natively

LEAST_SPEEDUP = 1.05
"""Least speedup over BF16 at which experts run in FP8."""


def choose_experts(
    model: nn.Module, experts: Mapping[str, nn.Module], config: FP8Config, device: torch.device
) -> ExpertChoice:
    """Choose FP8 or BF16 for each module of experts; if the measurement fails, warn and use FP8.

    Args:
        model: model to be converted.
        experts: modules of the fused weights that FP8 can run, by the weights' qualified names.
        config: options, with recipe ``auto``.
        device: device on which the model will run.
    Raises:
        RuntimeError: see `torch_fp8.distributed.agreement.answer_of_one`.
    """
    measured = {name: m for name, m in experts.items() if m not in _adapted(model)}
    native = config.backend == "torch" and not config.emulate and grouped_natively(device)
    if not (measured and native and can_ask()):
        return NO_EXPERTS
    shapes = {name: expert_shape(module, config.tokens) for name, module in measured.items()}
    modules = {shapes[name]: module for name, module in measured.items()}
    distinct = sorted(modules, key=repr)
    options = config.tokens, config.wgrad, config.fast_accum
    card, texts = Card.of(device), ("", "experts in FP8", "")

    def time(shape: ExpertShape) -> ExpertTimes:
        return expert_times(card, modules[shape], shape, config)

    answer = agreed_times(device, options, distinct, time, *texts)
    if "failure" in answer:
        return NO_EXPERTS
    times = {s: ExpertTimes(*t) for s, t in zip(distinct, answer["times"], strict=True)}
    speedups = {f"{s}, {s.rows} rows each": t.plain / t.fp8 for s, t in times.items()}
    left = {
        name: f"experts are {times[s].plain / times[s].fp8:.2f} times as fast in FP8, below the "
        f"{LEAST_SPEEDUP} required: {1e6 * times[s].fp8:.0f} us against "
        f"{1e6 * times[s].plain:.0f} us at {s.rows} rows each, {config.tokens} tokens"
        for name, s in shapes.items()
        if times[s].plain < LEAST_SPEEDUP * times[s].fp8
    }
    return ExpertChoice(speedups, left)


def _adapted(model: nn.Module) -> set[nn.Module]:
    """Return the modules of experts whose weights have PEFT adapters."""
    return {
        adapter.get_base_layer()
        for adapter in model.modules()
        if callable(getattr(adapter, "get_delta_factors", None))
    }
