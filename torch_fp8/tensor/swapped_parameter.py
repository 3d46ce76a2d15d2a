"""`SwappedParameter`: what a split Parameter keeps where `torch.utils.swap_tensors` writes it."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SwappedParameter:
    """Hooks and attributes of a split Parameter, while it is swapped for a plain one.

    A parametrization writes the Parameter so, and frees the other one then. This object goes along
    with the old tensor. When that is freed, the Parameter is split again and has its hooks and
    attributes. Its gradient, which is of the old values, is dropped.

    Args:
        parameter: Parameter that is about to be swapped.
        attributes: attributes that users have given it.
        split: splits it again.
    """

    def __init__(
        self, parameter: Tensor, attributes: dict[str, Any], split: Callable[[Tensor], Any]
    ) -> None:
        self.parameter = parameter  # no weak reference: torch refuses to swap what has any
        self.cls, self.attributes, self.split = type(parameter), attributes, split
        self.hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks

    def __del__(self) -> None:
        parameter = self.parameter
        if isinstance(parameter, self.cls) or sys.is_finalizing():
            return
        vars(parameter).update(self.attributes)
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = self.hooks
        if parameter.dtype == torch.float32:
            self.split(parameter)
