"""`SharedOutput`: a LayerNorm whose output is cast once for all FP8 layers that read it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import is_plain, is_transformed
from torch_fp8.autograd.function import name_of
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import quantize_layouts
from torch_fp8.quantization.scaling import tensor_amax
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor
from torch_fp8.tensor.producer import LazySource, Producer


@dataclass(eq=False)
class SharedFP8:
    """State that conversion adds to such a norm.

    Attributes:
        name: qualified name, for errors.
        groups: groups of layers that may read the output.
    """

    name: str
    groups: tuple[Any, ...] = ()


class SharedOutput(nn.Module):
    """Mixin of such a norm, in front of its own class; the values of its output do not change."""

    fp8: SharedFP8

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return shared(output, name_of(self)) if isinstance(output, Tensor) else output


def shared(x: Tensor, name: str) -> Tensor:
    """Wrap x (..., C) in a `LazyQuantizedTensor`, so that several layers share one cast of it.

    Args:
        x: plain tensor; any other value is returned unchanged.
        name: qualified name of the module whose layers share it.
    """
    if not is_plain(x) or not x.ndim or torch.compiler.is_compiling() or is_transformed():
        return x
    return _Shared.apply(x, name)


class Computed(Producer):
    """A result (R, C) that is already computed."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def dense(self) -> Tensor:
        return self._matrix

    def layouts(self, options: CastOptions) -> Payloads:
        return quantize_layouts(self._matrix, options)

    def amax(self) -> Tensor:
        return tensor_amax(self._matrix)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        matrix = x.detach().reshape(-1, x.shape[-1])  # (..., C) -> (R, C)
        return LazyQuantizedTensor(LazySource(name, (matrix,), Computed(matrix)), x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
