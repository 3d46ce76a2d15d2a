"""Number of multiply-adds of a model's GEMMs with a weight, and of those that run in FP8."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.layer_filter import (
    expert_weights,
    experts_per_token,
    features,
    is_linear,
    stacked_weights,
)
from torch_fp8.nn.linear import Float8Layer


class MatmulFlops(NamedTuple):
    """Multiply-adds per token of GEMMs with a weight, in forward and backward.

    Attributes:
        total: multiply-adds of all these GEMMs.
        fp8: multiply-adds of the GEMMs in FP8.
        experts: multiply-adds of fused experts that stay in high precision.
    """

    total: float
    fp8: float
    experts: float = 0.0


def matmul_flops(model: nn.Module) -> MatmulFlops:
    """Count the multiply-adds of a model: fprop and dgrad of each weight, wgrad if it is trained.

    Fused expert weights, with E first, count with the experts that compute a token if the module or
    the model's config gives their number (``top_k``, ``num_experts_per_tok``, ...), else with all.
    Attention's products have no weight and do not count.
    """
    total = fp8 = experts = 0.0
    for module in model.modules():
        in_fp8 = isinstance(module, (Float8Layer, Float8Experts))
        for numel, trained, of_experts in _weights(model, module):
            total += (2 + trained) * numel
            if in_fp8:
                fp8 += (2 + (trained and module.fp8.recipe.wgrad is not None)) * numel
            elif of_experts:
                experts += (2 + trained) * numel
    return MatmulFlops(total, fp8, experts)


def _weights(model: nn.Module, module: nn.Module) -> Iterator[tuple[float, bool, bool]]:
    """Yield (multiply-adds per token, is trained, is of experts) of each weight of a module."""
    if is_linear(module):
        weight = module._parameters.get("weight")  # may be packed, or missing
        yield math.prod(features(module)), weight is not None and weight.requires_grad, False
        return
    of_experts = any(expert_weights("", module))
    for key in stacked_weights("", module):
        parameter = module.get_parameter(key)
        share = _active_share(model, module, parameter) if of_experts else 1.0
        yield parameter.numel() * share, parameter.requires_grad, of_experts


def _active_share(model: nn.Module, module: nn.Module, parameter: torch.Tensor) -> float:
    count = parameter.shape[0]
    return min((experts_per_token(module, getattr(model, "config", None)) or count) / count, 1.0)
