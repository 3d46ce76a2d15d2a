"""Selection of the modules of fused experts that run in FP8, their conversion and its reverse."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.frozen_layers import option_that_keeps
from torch_fp8.nn import experts_dispatch
from torch_fp8.nn.class_swap import add_mixin, remove_mixin, stock_class
from torch_fp8.nn.experts import OWN, Float8BatchedExperts, Float8Experts, fused_names
from torch_fp8.nn.layer_filter import (
    ROUTER_NAMES,
    expert_weights,
    matches,
    stacked_weights,
    weight_reason,
)
from torch_fp8.ops.scaled_grouped_mm import reason_not_grouped, too_many

UNKNOWN = "fused expert weights in an unsupported layout"
STACKED = "3-D parameter, neither of a linear layer nor of experts"
_FLAGS = ("has_gate", "has_bias", "is_transposed")
_BATCHED = "Llama4TextExperts"


def expert_reason(
    name: str, module: nn.Module, config: FP8Config, recipe_name: str, device: torch.device
) -> str | None:
    """Return why the 3-D weights of a module stay in high precision, or None if they run in FP8.

    Args:
        name: qualified name of the module.
        module: module with 3-D weights, see `stacked_weights`.
        config: configuration; `skip`, `backend` and `emulate` matter.
        recipe_name: recipe of the linear layers.
        device: device on which the model will run.
    Raises:
        ValueError: the model asks for DeepGEMM, which has no backward in transformers.
    """
    names = [name, *stacked_weights(name, module)]
    for pattern in config.skip:
        if any(matches(pattern, full) for full in names):
            return f"skip={pattern!r}"
    # transformers' decorator sets these flags on a module that it dispatches.
    dispatched = experts_dispatch.functions() is not None and all(f in vars(module) for f in _FLAGS)
    if not (dispatched or is_batched(module)):
        return UNKNOWN if expert_weights(name, module) else STACKED
    weights: list[Any] = [module._parameters.get(key) for key in fused_names(module)]
    if any(weight is None for weight in weights):
        return UNKNOWN
    if config.backend != "torch":
        return f"backend={config.backend!r} does not support grouped GEMMs"
    if recipe_name == "mxfp8":
        return "grouped GEMMs with mxfp8 scales are not implemented yet; other recipes run experts"
    reasons = [weight_reason(weight) or too_many(tuple(weight.shape)) for weight in weights]
    otherwise = _implementation_reason(module) or reason_not_grouped(device, config.emulate)
    return next(filter(None, reasons), otherwise)


def is_batched(module: nn.Module) -> bool:
    """Return whether each expert of a module computes every token, as in Llama-4."""
    cls = stock_class(type(module))
    return cls.__name__ == _BATCHED and cls.__module__.startswith("transformers.")


def _implementation_reason(module: Any) -> str | None:
    """Return why the experts function of the model cannot be replaced by ours, or None if it
    can."""
    if is_batched(module):
        return "its forward was replaced on the instance" if "forward" in vars(module) else None
    implementation = module.config._experts_implementation
    if str(implementation).startswith("deepgemm"):
        raise ValueError(
            f"experts_implementation={implementation!r} has no backward in transformers, so a "
            "model with it cannot be trained; load it with experts_implementation='grouped_mm'"
        )
    if implementation in (experts_dispatch.ENTRY, "eager", None):
        return None
    return f"experts_implementation={implementation!r} computes them"


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers that choose experts, which are never converted.

    A router is a sibling of the experts, or lies within one, and has one output per expert.
    """
    for parent in model.modules():
        for child in parent.children():
            count = _num_experts(child)
            if count < 2:
                continue
            beside = [m for n, m in parent.named_children() if m is not child and n in ROUTER_NAMES]
            for layer in (m for sibling in beside for m in sibling.modules()):
                if isinstance(layer, nn.Linear) and layer.out_features == count:
                    yield layer


def _num_experts(module: nn.Module) -> int:
    if isinstance(module, nn.ModuleList):
        return len(module)
    if expert_weights("", module):
        return next(p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3)
    return 0


def to_float8(module: nn.Module, name: str, config: FP8Config, emulate: bool) -> None:
    """Make a module compute its experts in FP8; arguments as in `Float8Experts.configure`."""
    if not isinstance(module, Float8Experts):
        add_mixin(module, Float8BatchedExperts if is_batched(module) else Float8Experts)
    module.configure(name, config, emulate)
    if option_that_keeps(config) is not None:
        module.thaw_weights()
    if not is_batched(module) and module.config._experts_implementation == "eager":
        module.fp8_was_eager = True
        module.config._experts_implementation = experts_dispatch.ENTRY


def to_stock(module: Float8Experts) -> None:
    """Give a module its original class and weights back."""
    module.thaw_weights()
    if vars(module).get("fp8_was_eager"):
        module.config._experts_implementation = "eager"
    experts_dispatch.remove(module)
    for name in OWN:
        module.__dict__.pop(name, None)
    batched = isinstance(module, Float8BatchedExperts)
    remove_mixin(module, Float8BatchedExperts if batched else Float8Experts)
