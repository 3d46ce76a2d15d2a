"""Experts in a plan: the rows that each computes, and their baseline in BF16."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_fp8.nn.layer_filter import expert_weights, experts_per_token
from torch_fp8_tools.plan.layouts import build, period
from torch_fp8_tools.plan.setup import Setup


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


def rows_of_experts(setup: Setup) -> str:
    """Describe how many rows each expert computes in a micro-batch, or return an empty string."""
    top_k = experts_per_token(setup.config.get_text_config())
    for module in build(setup.config, num_layers=period(setup.config)).modules():
        for name in expert_weights("", module):
            num_experts = len(module.get_parameter(name))
            rows = setup.tokens * (top_k or num_experts) / num_experts
            return f"{rows:.0f} rows each of {num_experts} experts"
    return ""
