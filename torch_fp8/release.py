"""Gradient release: the optimizer runs in backward, and each gradient is freed at once.

As soon as autograd has accumulated a parameter's gradient, all uses of the parameter in this
backward are behind it: the parameter is stepped there and then, and its gradient is gone before the
next is made. The loop's ``optimizer.step()`` has only the bookkeeping left, and the run is the same
bit for bit.

That takes a loop with one backward per step, where nobody needs all gradients at once. Between
backward and ``step()`` ``p.grad`` is None, which functions that clip gradients take for a parameter
without any: they would find the norm 0, and clip nothing. So a Parameter has a class meanwhile that
tells them (`ReleasedParameter`): torch's by an error, a loop of one's own, which may only count, by
a warning at the line that reads. A second backward before ``step()`` and GradScaler are told, too.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.nn.weight_cache import WatchedParameter

_WHY = "FP8Config(gradient_release=True) has applied and freed"
_CLIPPING = "torch.nn.utils.clip_grad"
_OWN_PACKAGES = ("torch", "torch_fp8")
_GONE = (
    f"p.grad is None between backward and optimizer.step(): {_WHY} each gradient in backward, so "
    "that a norm taken here is 0. Take it in p.register_hook(...), which sees each gradient, or "
    "set gradient_release=False"
)


class _Released(Tensor):
    @property
    def grad(self) -> Tensor | None:
        grad: Tensor | None = torch.Tensor.grad.__get__(self)
        if grad is not None:
            return grad
        reader = str(sys._getframe(1).f_globals.get("__name__"))
        if reader == _CLIPPING:
            raise RuntimeError(
                f"{_WHY} the gradient of a parameter of shape {tuple(self.shape)} in backward: "
                "there is nothing left to clip. Take clip_grad_norm_ and clip_grad_value_ out of "
                "the loop, or set gradient_release=False"
            )
        if reader.partition(".")[0] not in _OWN_PACKAGES:
            warnings.warn(_GONE, stacklevel=2)
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)


class ReleasedParameter(_Released, WatchedParameter):
    """A Parameter between the backward that has stepped it and the optimizer's ``step()``.

    Its ``grad`` is None. Code other than torch's that reads it is warned, once at each line.

    Raises:
        RuntimeError: ``clip_grad_norm_`` or ``clip_grad_value_`` reads its ``grad``.
    """


class ReleasedDTensor(_Released, DTensor):
    """The same of a sharded Parameter."""


_CLASSES: dict[type[Tensor], type[Tensor]] = {
    nn.Parameter: ReleasedParameter,
    WatchedParameter: ReleasedParameter,
    DTensor: ReleasedDTensor,
}


def release_gradient(optimizer: Any, index: int, group: dict[str, Any], parameter: Tensor) -> None:
    """Step one parameter and free its gradient.

    Args:
        optimizer: converted, with gradient release.
        index: the parameter's place among all of it.
        group: that it belongs to.
        parameter: that has its gradient.
    Raises:
        RuntimeError: it was stepped since the last ``optimizer.step()`` already.
    """
    if index in optimizer.fp8_released:
        raise RuntimeError(
            f"parameter {index}, of shape {tuple(parameter.shape)}, got a second gradient before "
            f"optimizer.step(), but {_WHY} the first one in backward. Gradient accumulation over "
            "micro-batches, and checkpointing with use_reentrant=True of a weight that is used in "
            "several places, need gradient_release=False"
        )
    optimizer.step_parameters([(index, group, parameter)])
    # A sharded parameter has a version beside its shard's: a graph that still needs the old value
    # shall say so.
    torch.autograd.graph.increment_version(parameter)
    parameter.grad = None
    optimizer.fp8_released.add(index)
    cls: type[Tensor] = type(parameter)
    if cls in _CLASSES:
        parameter.__dict__["_fp8_class"], parameter.__class__ = cls, _CLASSES[cls]


def finish_release(optimizer: Any) -> None:
    """What is left of ``optimizer.step()``.

    Raises:
        RuntimeError: GradScaler runs the step: the gradients had its scale.
    """
    optimizer.fp8_released.clear()
    if not optimizer.fp8_config.gradient_release:
        return
    for _, _, parameter in optimizer.indexed_parameters():
        if isinstance(parameter, _Released):
            parameter.__class__ = parameter.__dict__.pop("_fp8_class")
    # What GradScaler tells an optimizer that unscales by itself.
    if hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            "GradScaler cannot unscale gradients that FP8Config(gradient_release=True) has applied "
            "in backward; BF16 needs no GradScaler, or set gradient_release=False"
        )
