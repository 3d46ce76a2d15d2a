"""Errors for optimizers with weights that `torch_fp8.freeze` stores as FP8 only.

Such weights never get a gradient, so the optimizer would silently skip them. Converting the
optimizer raises an error, and so does the first step of an optimizer that is not converted. The
frozen base below adapters is no mistake, because ``AdamW(model.parameters())`` contains it and
trains the adapters.
"""

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight

_frozen: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_checked: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def guard(model: nn.Module) -> None:
    """Make optimizers with frozen weights of `model` raise ValueError from now on."""
    _frozen.add(model)
    _checked.clear()
    _watch_first_steps()


def refuse_training(optimizer: Optimizer) -> None:
    """Raise ValueError if `optimizer` has a frozen weight of a guarded model."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for model in _frozen:
        if any("base_layer" in module._modules for module in model.modules()):
            continue
        for name, parameter in model.named_parameters():
            if parameter in held and isinstance(local(parameter), Float8FrozenWeight):
                raise ValueError(
                    f"{type(optimizer).__name__} has '{name}' of {type(model).__name__}, which "
                    "torch_fp8.freeze stores in FP8 only, so it cannot be trained. Call "
                    "torch_fp8.thaw(model) before you make the optimizer, or give it only the "
                    "parameters that require gradients"
                )


@functools.cache
def _watch_first_steps() -> None:
    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and optimizer not in _checked:
            refuse_training(optimizer)
            _checked.add(optimizer)

    register_optimizer_step_pre_hook(check)
