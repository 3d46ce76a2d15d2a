"""`WideGrad`: a BF16 gradient that reads as float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.tensor.encoded import Encoded, plain


class WideGrad(Encoded):
    """The BF16 gradient of a `SplitWeight`, which reads as float32; writes round to BF16.

    Attributes:
        stored: gradient in bfloat16.
    """

    stored: Tensor
    foreach_methods = frozenset(("mul_", "div_", "zero_"))

    @staticmethod
    def __new__(cls: Any, stored: Tensor) -> "WideGrad":
        self: WideGrad = torch.Tensor._make_wrapper_subclass(
            cls,
            stored.shape,
            strides=stored.stride(),
            dtype=torch.float32,
            device=stored.device,
        )
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

    def alias(self) -> "WideGrad":
        return WideGrad(self.stored.detach())

    def take(self, x: Tensor) -> None:
        self.stored.data = plain(x).to(torch.bfloat16)  # aliases keep the old memory

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
