"""Changing the tensor class of a Parameter while it stays the same object."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.readable import refuse_swap, swappable
from torch_fp8.tensor.wide_grad import adapt_hooks

_OWN = ("halves", "_joined", "_is_param", "_wide_grad", "_swapped")
"""Attributes that belong to a `torch_fp8.tensor.split_weight.SplitWeight` itself."""

stored_grad: Callable[[Tensor], Tensor | None] = torch.Tensor.grad.__get__
"""Function that returns ``parameter.grad`` in the form in which it is stored."""


def exchange(parameter: Tensor, other: Tensor) -> None:
    """Swap a Parameter's implementation with that of another tensor, and drop its gradient.

    The Parameter stays the same object with its attributes and hooks. Unlike with
    ``torch.utils.swap_tensors``, there may be weak references from Python to it. A graph that was
    built before still delivers its gradient.

    Raises:
        RuntimeError: torch cannot swap it (`torch_fp8.tensor.readable`); nothing is changed.
    """
    refuse_swap(parameter)
    hooks, accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch.Tensor.grad.__set__(parameter, None)
    parameter._backward_hooks = None
    attributes = {**attributes_of(parameter), **vars(other)}
    parts = {name: x for name, x in vars(parameter).items() if name in _OWN}
    torch._C._swap_tensor_impl(parameter, other)
    parameter.__class__, other.__class__ = type(other), type(parameter)
    vars(parameter).clear()
    vars(parameter).update(attributes)
    vars(other).clear()
    vars(other).update(parts)  # an earlier graph may read it
    if other.requires_grad:  # else an earlier graph delivers nothing
        other.register_post_accumulate_grad_hook(lambda old: _deliver(old, parameter))
    adapt_hooks(parameter, hooks, is_split=is_split(parameter))
    if accumulated is not None:
        parameter._post_accumulate_grad_hooks = accumulated


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that other code has set on a Parameter."""
    return {name: x for name, x in vars(parameter).items() if name not in _OWN}


def _deliver(old: Tensor, parameter: Tensor) -> None:
    """Move a gradient from a graph that was built before the exchange to the Parameter."""
    grad = stored_grad(old)
    torch.Tensor.grad.__set__(old, None)
    if grad is not None:
        if not is_split(parameter):
            grad = plain(grad).to(parameter.dtype)
        before = parameter.grad
        parameter.grad = grad if before is None else plain(before) + grad


def is_split(parameter: Tensor) -> bool:
    """Return whether a Parameter is a `torch_fp8.tensor.split_weight.SplitWeight`."""
    return "halves" in vars(parameter)


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
        if parameter.dtype == torch.float32 and swappable(parameter):
            self.split(parameter)
