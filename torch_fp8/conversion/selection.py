"""Selection of the matrix products of a model that can run in FP8, with reasons for the others."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.expert_layers import expert_reason, routers
from torch_fp8.conversion.layer_options import high_precision_pattern
from torch_fp8.conversion.output_layers import output_layer_rules
from torch_fp8.conversion.report import SkippedModule
from torch_fp8.nn.layer_filter import (
    ADAPTER,
    QUANTIZED,
    adapter_modules,
    is_linear,
    quantized_by,
    skip_reason,
    stacked_weights,
)
from torch_fp8.nn.transformer_engine import unaligned
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.quantization.wording import first_of

RUNS_IN_FP8 = "FP8 runs linear layers with 16 or more features"


class NothingToConvertError(ValueError):
    """The model has no layer that can run in FP8. It is unchanged.

    Attributes:
        reason: reason, without the advice at the end of the message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. {RUNS_IN_FP8}; train this model in BF16 mixed precision")
        self.reason = reason


class Product(NamedTuple):
    """A matrix product with a weight.

    Attributes:
        name: qualified name of the linear layer, or of the fused expert weight.
        module: linear layer, or the module that holds the fused experts.
        reason: reason why the product stays in high precision, or None if it can run in FP8.
    """

    name: str
    module: Any
    reason: str | None


def select(
    model: nn.Module, config: FP8Config, recipe: Recipe, device: torch.device
) -> list[Product]:
    """Return each matrix product of `model` that has a weight, for a run on `device`.

    Raises:
        NothingToConvertError: none can run in FP8, and no other library has quantized one.
    """
    products = list(_products(model, config, recipe, device))
    skipped = [SkippedModule(name, reason) for name, _, reason in products if reason is not None]
    if len(skipped) < len(products) or any(s.reason.startswith(QUANTIZED) for s in skipped):
        return products
    name = type(model).__name__
    why = f"{name} has no nn.Linear: there is nothing to run in FP8"
    if skipped:
        why = f"no linear layer of {name} can run in FP8 ({first_reasons(skipped)})"
    raise NothingToConvertError(why)


def _products(
    model: nn.Module, config: FP8Config, recipe: Recipe, device: torch.device
) -> Iterator[Product]:
    skip, skip_of_frozen, kept_high = output_layer_rules(model, config)
    kept_high |= dict.fromkeys(routers(model), "router of experts")
    kept_high |= dict.fromkeys(adapter_modules(model), ADAPTER)
    for name, module in model.named_modules():
        if not is_linear(module):
            library = quantized_by(module)
            if library is not None:
                yield Product(name, module, f"{QUANTIZED}{library}")
                continue
            stacked = list(stacked_weights(name, module))
            if stacked:
                why = high_precision_pattern(name, config)
                why = why or expert_reason(name, module, config, recipe.name, device)
                yield from (Product(full, module, why) for full in stacked)
            continue
        reason = skip_reason(name, module, skip_of_frozen.get(module, skip), kept_high)
        if reason is None:
            reason = high_precision_pattern(name, config)
        if reason is None and config.backend == "transformer-engine":
            reason = unaligned(module, recipe)
        yield Product(name, module, reason)


def first_reasons(skipped: Sequence[tuple[str, str]], most: int = 5) -> str:
    """Join the names and reasons of the first `most` modules, and the number of the others."""
    return first_of([f"'{name}': {reason}" for name, reason in skipped], most, "; ")
