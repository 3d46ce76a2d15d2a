"""`Float8Grad`: a gradient with 8 bits per element that reads as a tensor of the weight's dtype.

At O3, ``p.grad`` holds it: codes of `formats.GRADIENT` with a power-of-two scale for each group of
32, 1.03 bytes per element, and one () float32 ``multiplier`` for all (arithmetic in
`torch_fp8.ops.grad_codec`). It acts like a plain tensor:

* Reading decodes, in norms, loggers, ``isfinite`` and stock optimizers. A group with an Inf or a
  NaN reads as NaN. Norms decode a few rows at a time.
* Multiplication by a number, as in clipping and unscaling, only changes the multiplier.
* ``add_``, with which autograd accumulates, encodes the sum again, in 8 bits.
* Copies are plain, so that an optimizer's momentum from ``grad.clone()`` keeps its precision.
* Any other write decodes, writes and encodes, also in lists (``torch._foreach_*``, one tensor at a
  time) and through views.

A tensor subclass suits a gradient, unlike a weight, because other code never saves, ties or shards
gradients.
"""

import builtins
import math
import operator
from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.function import outside_inference_mode, reshaped
from torch_fp8.kernels.arguments import GradientParts
from torch_fp8.ops.grad_codec import (
    Rounding,
    accumulate_gradient,
    decode_gradient,
    has_nonfinite,
    norm,
    quantize_gradient,
    zero_gradient,
)
from torch_fp8.quantization.block_scaled import matrix_shape
from torch_fp8.tensor.base import wrapper
from torch_fp8.tensor.encoded import LIST_HANDLERS, plain
from torch_fp8.tensor.quantized_state import Coded
from torch_fp8.tensor.readable import on_dense

_aten: Any = torch.ops.aten


class Float8Grad(Coded):
    """A gradient in 8 bits.

    Attributes:
        codes: its parts, the arguments of an optimizer's step.
        rounding: source of random bits for the next encoding.
    """

    codes: GradientParts
    rounding: Rounding
    multiplier = property(operator.attrgetter("codes.multiplier"))

    foreach_methods = frozenset(
        ("mul_", "div_", "add_", "sub_", "zero_", "copy_", "clamp_min_", "clamp_max_")
    )

    @staticmethod
    def __new__(
        cls,
        parts: GradientParts,
        shape: torch.Size,
        dtype: torch.dtype,
        rounding: Rounding | None = None,
    ) -> "Float8Grad":
        self: Float8Grad = wrapper(cls, shape, dtype, parts.qdata.device)
        self.codes, self.rounding = parts, rounding or Rounding()
        self.form = shape, dtype, self.rounding
        return self

    @staticmethod
    def quantize(
        x: Tensor,
        rounding: Rounding | None = None,
        dtype: torch.dtype | None = None,
        *,
        exchanged: bool = False,
    ) -> "Float8Grad":
        """Encode a gradient.

        Args:
            x: bfloat16 or float32, with at least one dimension.
            rounding: source of random bits, or None for a new one.
            dtype: dtype that the result reads as, or None for that of `x`.
            exchanged: whether x is an average over ranks, which all ranks must round alike.
        """
        rounding = rounding or Rounding()
        keys = rounding.next_exchanged() if exchanged else rounding.next()
        matrix = x if x.ndim == 2 else x.reshape(matrix_shape(x.shape))  # (R, K)
        parts = quantize_gradient(matrix.contiguous(), keys)
        return Float8Grad(parts, x.shape, dtype or x.dtype, rounding)

    @torch.no_grad()
    def store(self, x: Tensor, *, exchanged: bool = False) -> None:
        """Encode `x`, of this shape, in place; for `exchanged` see `quantize`."""
        keys = self.rounding.next_exchanged() if exchanged else self.rounding.next()
        torch._foreach_copy_(self.codes, quantize_gradient(self._matrix(x), keys))

    def take(self, x: Tensor) -> None:
        # Aliases keep the old parts.
        self.codes = quantize_gradient(self._matrix(x), self.rounding.next())

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a plain tensor of this shape, in `dtype` or the tensor's own dtype."""
        # Not a view: as a gradient, a view would keep this memory after its `.data` is set.
        return reshaped(decode_gradient(self.codes, dtype or self.dtype), self.shape)

    def _matrix(self, x: Tensor) -> Tensor:
        x = plain(x)
        if x.dtype not in (torch.bfloat16, torch.float32):
            x = x.float()
        return x.to(self.device).expand(self.shape).contiguous().view(self.qdata.shape)

    @classmethod
    def __metadata_guard__(cls, known: Any, other: Any) -> bool:
        """Return whether a graph traced with `known` serves `other`; rounding may differ."""
        return bool(known[:3] == other[:3])

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> "Float8Grad":
        parts = GradientParts(*map(torch.clone, self.codes))
        return Float8Grad(parts, self.shape, self.dtype, self.rounding.copy())

    def __repr__(self) -> str:
        return f"Float8Grad(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _unscale(grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Run GradScaler's unscaling: multiply by `inv_scale`, and set `found_inf` for Inf or NaN."""
    others = [g for g in grads if not isinstance(g, Float8Grad)]
    if others:
        on_dense(_UNSCALE, (others, found_inf, inv_scale), {})
    for grad in grads:
        if isinstance(grad, Float8Grad):
            bad = has_nonfinite(grad.codes).to(found_inf)
            found_inf.copy_(torch.maximum(found_inf, bad.expand_as(found_inf)))
            grad.multiplier.mul_(inv_scale.reshape(()))


_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
LIST_HANDLERS[_UNSCALE] = _unscale


# Operators that a `Float8Grad` implements itself. Each handler takes the operator's arguments, with
# a gradient first, and returns its result, or NotImplemented to run it on a decoded tensor.


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
    accumulate_gradient(grad.codes, grad._matrix(other), grad.rounding.next())
    return grad


def _subtract(grad: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _add(grad, other, alpha=-alpha)


def _zero(grad: Any) -> Any:
    zero_gradient(grad.codes)
    grad.rounding.reset()
    return grad


def _copy(grad: Any, source: Tensor, non_blocking: bool = False) -> Any:
    if type(source) is type(grad) and source.shape == grad.shape:
        torch._foreach_copy_(grad.codes, source.codes, non_blocking)
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
    return norm(grad.codes, ord).to(dtype or grad.dtype)


Float8Grad.handlers = {
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
