"""`SharedParts`: tensor subclasses whose component tensors can be shared between processes.

As with a plain tensor, torch's multiprocessing moves what it sends into shared memory, so that both
processes read and write the same parts.
"""

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn


class SharedParts(Tensor):
    """A tensor whose ``__tensor_flatten__`` names its parts."""

    __tensor_flatten__: Any
    __tensor_unflatten__: Any

    def share_memory_(self) -> Tensor:
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(getattr(self, name).is_shared() for name in self.__tensor_flatten__()[0])


def in_shared_memory(tensor: Tensor) -> bool:
    """Return whether other processes may write to a tensor, so that nothing derived from it lasts.

    Version numbers count the writes of one process. Processes share our tensors only on the CPU.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False  # compiled code derives everything anew
    return tensor.is_shared()


def send_shared(cls: type[SharedParts]) -> None:
    """Have multiprocessing send tensors of a class in their own form, with shared memory."""
    ForkingPickler.register(cls, _reduce)


def _reduce(tensor: SharedParts) -> Any:
    if tensor.device.type != "cpu":
        return tensor.__reduce_ex__(2)
    with torch.no_grad():
        tensor.share_memory_()
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    is_parameter = isinstance(tensor, nn.Parameter)
    return _rebuild, (type(tensor), parts, context, tensor.requires_grad, is_parameter)


def _rebuild(cls: Any, parts: Any, context: Any, requires_grad: bool, is_parameter: bool) -> Any:
    tensor = cls.__tensor_unflatten__(parts, context, None, None)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor
