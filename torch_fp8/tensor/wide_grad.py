"""`WideGrad`: a BF16 gradient that reads as float32.

A sum of many gradients in BF16 would fall short, because a term below half of its last bit adds
nothing. So the first gradient is stored in BF16, and the second one turns it into float32:
`widen_sum` before autograd adds to ``p.grad``, and `WideGrad` when other code does.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.tensor.base import wrapper
from torch_fp8.tensor.encoded import Encoded, plain

_aten: Any = torch.ops.aten
_SUM = "torch_fp8_sum"
"""The key of `widen_sum` among a Parameter's hooks."""
_ZERO = "fp8_zero"
"""The attribute of a stored gradient with the version in which it is zero."""


class WideGrad(Encoded):
    """The BF16 gradient of a `SplitWeight`, which reads as float32.

    Writes round to BF16, but adding another gradient makes it float32.

    Attributes:
        stored: gradient in bfloat16, or a sum of several in float32. Aliases share it.
    """

    stored: Tensor
    foreach_methods = frozenset(("mul_", "div_", "zero_", "add_", "sub_"))

    @staticmethod
    def __new__(cls: Any, stored: Tensor) -> "WideGrad":
        strides = stored.stride()
        self: WideGrad = wrapper(cls, stored.shape, torch.float32, stored.device, strides=strides)
        self.stored = stored
        return self

    @property
    def _version(self) -> int:
        return self.stored._version

    def dequantize(self) -> Tensor:
        return self.stored.detach().float()

    @torch.no_grad()
    def store(self, x: Tensor) -> None:
        self.stored.copy_(plain(x))
        vars(self.stored).pop(_ZERO, None)  # the version does not show this write

    def alias(self) -> "WideGrad":
        return WideGrad(self.stored)

    def take(self, x: Tensor) -> None:
        self.stored.data = plain(x).to(self.stored.dtype)
        vars(self.stored).pop(_ZERO, None)

    @property
    def high(self) -> Tensor:
        return self.stored

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high"], None  # torch 2.11 needs the name of a part of the weight

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "WideGrad":
        return WideGrad(inner["high"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dequantize()

    def __repr__(self, **options: Any) -> str:
        return repr(self.dequantize())


def _sum(sign: int) -> Any:
    def add(grad: WideGrad, other: Any, *, alpha: Any = 1) -> Any:
        if not isinstance(other, Tensor) or other.shape != grad.shape:
            return NotImplemented
        _widen(grad.stored)
        grad.stored.add_(plain(other), alpha=sign * alpha)
        return grad

    return add


def _zero(grad: WideGrad) -> WideGrad:
    vars(grad.stored)[_ZERO] = grad.stored.zero_()._version
    return grad


WideGrad.handlers = {
    _aten.add_.Tensor: _sum(1),
    _aten.sub_.Tensor: _sum(-1),
    _aten.zero_.default: _zero,
}


def _widen(stored: Tensor) -> None:
    """Turn a BF16 gradient into float32; it stays the same object, which other code may hold."""
    if stored.dtype == torch.bfloat16:
        stored.data = stored.detach().float()


@torch.utils.hooks.unserializable_hook
def widen_sum(grad: Tensor) -> None:
    """Turn a BF16 ``p.grad`` into float32, as autograd is about to add another gradient to it.

    Zeros stay BF16, because their sum with a gradient is exact: ``zero_grad(set_to_none=False)``
    leaves them, and what follows is the same as after None.
    """
    parameter = getattr(torch._C._current_autograd_node(), "variable", None)
    before = None if parameter is None else torch.Tensor.grad.__get__(parameter)
    if before is None or before.dtype != torch.bfloat16 or "halves" not in vars(parameter):
        return
    if vars(before).get(_ZERO) == before._version:
        return
    if before.requires_grad:  # autograd builds a graph and adds out of place
        torch.Tensor.grad.__set__(parameter, before.float())
    else:
        _widen(before)


def adapt_hooks(parameter: Tensor, hooks: Any, *, is_split: bool) -> None:
    """Set the gradient hooks of a Parameter.

    Args:
        parameter: the Parameter.
        hooks: dict of the hooks that user code has registered, which stays the same object.
        is_split: whether the Parameter is a `SplitWeight`, whose gradients are BF16.
    """
    if hooks is None:
        hooks = OrderedDict()
    hooks.pop(_SUM, None)
    for key, hook in hooks.items():
        hook = hook.hook if isinstance(hook, WideHook) else hook
        hooks[key] = WideHook(hook) if is_split else hook
    if is_split:
        hooks[_SUM] = widen_sum
    parameter._backward_hooks = hooks or None


class WideHook:
    """Wraps a user's gradient hook, so that it sees a BF16 gradient as float32."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor) -> Any:
        narrow = grad.dtype == torch.bfloat16 and not isinstance(grad, Encoded)
        result = self.hook(WideGrad(grad) if narrow else grad)
        if isinstance(result, WideGrad):
            return result.stored
        return result.to(grad.dtype) if narrow and isinstance(result, Tensor) else result
