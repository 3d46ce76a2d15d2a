"""`ReleasedGrad`: what is left of a gradient that gradient release has applied and freed."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.tensor.base import map_tensors
from torch_fp8.tensor.dtensor import local

_NEED_NO_VALUES = ("aten::detach", "aten::detach_", "aten::zero_")


def second_gradient(shape: torch.Size) -> RuntimeError:
    """Return the error for code that needs a gradient which backward has applied and freed."""
    return RuntimeError(
        "FP8Config(gradient_release=True) has applied and freed the gradient of a parameter of "
        f"shape {tuple(shape)} in backward. A second gradient before optimizer.step() (gradient "
        "accumulation over micro-batches; checkpointing with use_reentrant=True when a weight is "
        "used in several places), clip_grad_norm_ (max_grad_norm=0 turns it off in transformers), "
        "clip_grad_value_, GradScaler and norms of all gradients need gradient_release=False. A "
        "hook, p.register_hook(...), sees each gradient"
    )


class ReleasedGrad(Tensor):
    """A gradient without memory, of the parameter's shape, from backward until ``step()``.

    You can test, detach, move and zero it.

    Raises:
        RuntimeError: an operator needs its values.
    """

    __torch_function__ = torch.nn.Parameter.__torch_function__

    @staticmethod
    def __new__(cls: Any, like: Tensor, **options: Any) -> "ReleasedGrad":
        options = {"dtype": like.dtype, "device": like.device, **options}
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_size=0, **options
        )

    @classmethod
    @torch._disable_dynamo  # imports torch._dynamo at the first call
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator, kwargs = func._schema.name, kwargs or {}
        if operator == "aten::_foreach_zero_":
            return func([grad for grad in args[0] if not isinstance(grad, ReleasedGrad)])
        if operator in _NEED_NO_VALUES:
            return args[0]
        if operator == "aten::_to_copy":
            given = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name)}
            return ReleasedGrad(args[0], **given)
        tensors: list[Tensor] = []
        map_tensors((args, kwargs), tensors.append)
        raise second_gradient(next(x for x in tensors if isinstance(x, ReleasedGrad)).shape)

    def __repr__(self, **options: Any) -> str:
        return f"ReleasedGrad(shape={tuple(self.shape)})"


def release(parameter: Tensor) -> None:
    """Free a parameter's gradient."""
    released = ReleasedGrad(local(parameter))
    grad = torch.Tensor.grad.__get__(parameter)
    if isinstance(grad, DTensor):
        grad._local_tensor = released
    else:
        torch.Tensor.grad.__set__(parameter, released)


def is_released(parameter: Tensor) -> bool:
    """Return whether gradient release has freed the gradient of a parameter."""
    grad: Tensor | None = torch.Tensor.grad.__get__(parameter)
    return grad is not None and isinstance(local(grad), ReleasedGrad)
