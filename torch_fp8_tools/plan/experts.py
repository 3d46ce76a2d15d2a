"""An estimate of grouped GEMMs of experts in BF16 and FP8, and whether FP8 is faster.

Each expert computes ``tokens * top_k / num_experts`` rows on average. GEMMs work on tiles of 128
rows, so a few rows waste arithmetic, in BF16 and FP8 alike. FP8 adds memory traffic, given here in
bytes per element: tokens and their gradients are cast (3) before they are gathered (2, against 4 in
BF16), both operands of wgrad are transposed (3), and a trained weight is cast twice in each
micro-batch (3 and 3), however few rows its expert has. A frozen weight is transposed in backward
(2). The activation and its gradient are written in FP8 instead of BF16 at no cost.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.layer_filter import expert_weights, experts_per_token
from torch_fp8_tools.plan.cards import SHARE_OF_BANDWIDTH, SHARE_OF_FLOPS
from torch_fp8_tools.plan.setup import Setup

TILE = 128
"""The number of rows in a tile of a grouped GEMM."""
LEAST_SPEEDUP = 1.05
"""The minimum predicted speedup of FP8; experts below it are planned in BF16."""
SKIP = "*.experts"
"""The pattern for `FP8Config.skip` that leaves experts in BF16."""
_CAST, _GATHER, _TRANSPOSE, _BF16_GATHER, _TURN = 3.0, 2.0, 3.0, 4.0, 2.0


class GroupedInBF16(TorchFunctionMode):
    """Run grouped GEMMs in BF16, as autocast would if it supported them.

    With float32 weights stock experts compute in float32, which is no useful baseline for FP8.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "_grouped_mm":  # the operator behind F.grouped_mm
            args = tuple(a.to(torch.bfloat16) if _is_float32(a) else a for a in args)
        return func(*args, **(kwargs or {}))


def _is_float32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32


@dataclass(frozen=True)
class ExpertWeight:
    """A fused expert weight of a block.

    Attributes:
        num_experts, rows, cols: the sizes E, N (outputs) and K (inputs).
        top_k: the number of experts that compute a token.
        gathers: whether its inputs are tokens, which are gathered for their experts.
        frozen, in_fp8: whether it is frozen, and whether it is multiplied in FP8.
    """

    num_experts: int
    rows: int
    cols: int
    top_k: int
    gathers: bool
    frozen: bool
    in_fp8: bool


def expert_weights_of(model: nn.Module, config: Any) -> tuple[ExpertWeight, ...]:
    """Collect the fused weights of a model's experts.

    Args:
        model: the model, converted or not.
        config: its transformers configuration, which states how many experts compute a token.
    """
    text = config.get_text_config()
    top_k = experts_per_token(text)
    weights = []
    for module in model.modules():
        for position, name in enumerate(expert_weights("", module)):
            weight = module.get_parameter(name)
            num_experts, rows, cols = weight.shape
            if getattr(module, "is_transposed", False):
                rows, cols = cols, rows
            in_fp8 = isinstance(module, Float8Experts)
            shape = num_experts, rows, cols, top_k or num_experts
            weights.append(ExpertWeight(*shape, position == 0, not weight.requires_grad, in_fp8))
    return tuple(weights)


def rows_per_expert(setup: Setup, weight: ExpertWeight) -> float:
    """Return the average number of rows that an expert computes in a micro-batch."""
    return setup.tokens * weight.top_k / weight.num_experts


def expert_seconds(
    setup: Setup, weights: Iterable[ExpertWeight], *, in_fp8: bool, trained: bool
) -> tuple[float, float]:
    """Estimate the GEMMs of experts in a micro-batch, and the memory traffic around them.

    Args:
        setup: the planned run.
        weights: the fused weights.
        in_fp8: whether they run in FP8.
        trained: whether there is a backward.
    Returns:
        (seconds of GEMMs, seconds of casts, gathers and transpositions).
    """
    peak = SHARE_OF_FLOPS * (setup.card.fp8 if in_fp8 else setup.card.bf16)
    bandwidth = SHARE_OF_BANDWIDTH * setup.card.bandwidth
    gemms = moved = 0.0
    for weight in weights:
        experts, n, k = weight.num_experts, weight.rows, weight.cols
        m = setup.tokens * weight.top_k
        tiles = experts * -(-rows_per_expert(setup, weight) // TILE) * TILE
        elements, size = experts * n * k, 1 if in_fp8 else 2
        forward = size * (m * k + elements) + 2 * m * n
        backward = size * (m * n + elements) + 2 * m * k
        weight_grad = size * m * (n + k) + 2 * elements
        passes = [forward] * (1 + (trained and setup.checkpointing))
        passes += [backward] * trained + [weight_grad] * (trained and not weight.frozen)
        gemms += sum(max(2 * tiles * n * k / peak, num / bandwidth) for num in passes)
        moved += _moved_bytes(setup, weight, in_fp8, trained) / bandwidth
    return gemms, moved


def _moved_bytes(setup: Setup, weight: ExpertWeight, in_fp8: bool, trained: bool) -> float:
    n, k, m = weight.rows, weight.cols, setup.tokens * weight.top_k
    # The first weight's input is tokens; the second one's grad_output is their gradients.
    hidden, has_tokens = (k, True) if weight.gathers else (n, trained)
    if not in_fp8:
        return _BF16_GATHER * m * hidden * has_tokens
    elements, updates = weight.num_experts * n * k, trained and not weight.frozen
    moved = (_CAST * setup.tokens + _GATHER * m) * hidden * has_tokens
    moved += _TRANSPOSE * m * (n + k) * updates
    if weight.frozen:
        return moved + _TURN * elements * trained
    return moved + _CAST * elements * (1 + trained)


def speedup(setup: Setup, weights: Iterable[ExpertWeight], *, trained: bool) -> float:
    """Return the estimated speedup of experts in FP8 over BF16."""
    weights = list(weights)
    plain, fp8 = (
        sum(expert_seconds(setup, weights, in_fp8=in_fp8, trained=trained))
        for in_fp8 in (False, True)
    )
    return plain / fp8
