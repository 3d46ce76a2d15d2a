"""`SwappedParameter`: keeps a split Parameter's hooks while `torch.utils.swap_tensors` swaps it."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SwappedParameter:
    """The hooks and attributes of a split Parameter while it is swapped with a plain one.

    A parametrization writes a Parameter by such a swap, and then frees the other tensor. This
    object is an attribute of the old tensor. When that is freed, the Parameter is split again and
    gets its hooks and attributes back. Its gradient belongs to the old values and is dropped.

    Args:
        parameter: Parameter that is about to be swapped.
        attributes: attributes that user code has set on it.
        split: function that splits it again.
    """

    def __init__(
        self, parameter: Tensor, attributes: dict[str, Any], split: Callable[[Tensor], Any]
    ) -> None:
        self.parameter = parameter  # not a weak reference, which would prevent the swap
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
