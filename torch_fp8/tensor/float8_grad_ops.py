"""Operators that `torch_fp8.tensor.float8_grad.Float8Grad` implements itself.

Each handler takes the operator's arguments, with a `Float8Grad` first, and returns its result, or
NotImplemented to run the operator on a decoded tensor.
"""

import builtins
import math
from typing import Any

import torch
from torch import Tensor

from torch_fp8.ops.grad_codec import norm, zero_gradient

_aten: Any = torch.ops.aten


def _to_copy(
    grad: Any, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> Any:
    if dtype is None or not dtype.is_floating_point:
        return NotImplemented
    return grad.dequantize(dtype).to(device or grad.device, non_blocking=non_blocking)


def _scale(function: str) -> Any:
    def scale(grad: Any, other: Any) -> Any:
        if isinstance(other, Tensor):
            if other.numel() != 1 or other.ndim > grad.ndim:
                return NotImplemented
            other = other.reshape(())
        getattr(grad.multiplier, function)(other)
        return grad

    return scale


def _add(grad: Any, other: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(other, Tensor) or other.shape != grad.shape:
        return NotImplemented
    if alpha != 1:
        other = other * alpha
    grad.accumulate(other)
    return grad


def _subtract(grad: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _add(grad, other, alpha=-alpha)


def _zero(grad: Any) -> Any:
    zero_gradient(grad.parts())
    grad.rounding.reset()
    return grad


def _copy(grad: Any, source: Tensor, non_blocking: bool = False) -> Any:
    if type(source) is type(grad) and source.shape == grad.shape:
        for target, part in zip(grad.parts(), source.parts(), strict=True):
            target.copy_(part, non_blocking)
    else:
        grad.store(source)
    return grad


def _clamp(grad: Any, min: Any = None, max: Any = None) -> Any:
    """Clamp relative to the larger bound. That bound is stored exactly, so no value exceeds it."""
    bounds = [b for b in (min, max) if b is not None]
    if any(isinstance(b, Tensor) for b in bounds):
        return NotImplemented
    unit = float(builtins.max(abs(b) for b in bounds))
    if not 0 < unit < math.inf:
        return NotImplemented
    relative = [None if b is None else b / unit for b in (min, max)]
    grad.store(grad.dequantize().div_(unit).clamp_(*relative))
    grad.multiplier.fill_(unit)
    return grad


def _clamp_max(grad: Any, max: Any) -> Any:
    return _clamp(grad, None, max)


def _norm(
    grad: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    every = dim is None or len(dim) in (0, grad.ndim)
    if not every or keepdim or ord == 0 or not grad.numel() or grad.device.type == "meta":
        return NotImplemented
    return norm(grad.parts(), ord).to(dtype or grad.dtype)


HANDLERS = {
    _aten._to_copy.default: _to_copy,
    _aten.mul_.Tensor: _scale("mul_"),
    _aten.mul_.Scalar: _scale("mul_"),
    _aten.div_.Tensor: _scale("div_"),
    _aten.div_.Scalar: _scale("div_"),
    _aten.add_.Tensor: _add,
    _aten.sub_.Tensor: _subtract,
    _aten.zero_.default: _zero,
    _aten.copy_.default: _copy,
    _aten.clamp_.default: _clamp,
    _aten.clamp_min_.default: _clamp,
    _aten.clamp_max_.default: _clamp_max,
    _aten.linalg_vector_norm.default: _norm,
}
"""Operators that a `Float8Grad` implements itself, with their handlers."""
