"""The choice that ``auto`` makes for fused experts: FP8, or BF16 where FP8 does not pay.

Each distinct block of experts is timed on the device as it trains, in FP8 and by transformers in
BF16, with the rows that an expert gets of ``FP8Config.tokens``
(`torch_fp8.conversion.expert_benchmark`). Casting a weight costs the same however few rows its
expert has, so that small experts want many tokens. One that is less than `LEAST_SPEEDUP` times as
fast in FP8 stays in BF16. Experts with adapters run FP8 unasked: their weights are stored as FP8
alone, and no other function multiplies by the factors. Ranks agree as they do on layers
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
"""Experts that are less than so much faster in FP8 are left in BF16."""


def choose_experts(
    model: nn.Module, experts: Mapping[str, nn.Module], config: FP8Config, device: torch.device
) -> ExpertChoice:
    """Choose for each module of experts; a failure to measure is a warning, and leaves FP8.

    Args:
        model: model to be converted.
        experts: module of each fused weight that FP8 can run, by the weight's qualified name.
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
    """Return the experts whose weights have adapters of PEFT."""
    return {
        adapter.get_base_layer()
        for adapter in model.modules()
        if callable(getattr(adapter, "get_delta_factors", None))
    }
