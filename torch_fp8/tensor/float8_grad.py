"""`Float8Grad`: a gradient of 8 bits per element that reads as a tensor of the weight's dtype.

It is what ``p.grad`` holds at level O3: codes of `formats.GRADIENT` with a power-of-two scale for
each group of 32, 1.03 bytes per element, and one () float32 ``multiplier`` of all
(`torch_fp8.ops.grad_codec` has the arithmetic). Whoever finds it takes it for a plain tensor:

* reading decodes: norms, loggers, ``isfinite``, stock optimizers. A group with an Inf or a NaN
  reads NaN. Norms decode a few rows at a time;
* a product with a number, which is what clipping and unscaling are, moves the multiplier alone;
* ``add_``, with which autograd accumulates, encodes the sum again: it stays at 8 bits;
* copies are plain: an optimizer's momentum that starts as ``grad.clone()`` keeps its precision;
* any other write decodes the tensor, writes and encodes it, also in lists (``torch._foreach_*``,
  one tensor after the other) and through views.

A subclass is in place here, as it would not be for the weight: a gradient is never saved, tied or
sharded by others.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import GradientParts
from torch_fp8.ops.grad_codec import (
    Rounding,
    accumulate_gradient,
    decode_gradient,
    has_nonfinite,
    quantize_gradient,
)
from torch_fp8.quantization.block_scaled import matrix_shape
from torch_fp8.tensor.encoded import Encoded, EncodedView
from torch_fp8.tensor.float8_grad_ops import HANDLERS

_unsafe_view: Any = torch.ops.aten._unsafe_view.default._op


class Float8Grad(Encoded):
    """A gradient in 8 bits. Its parts are written in place: detached aliases share them.

    Attributes:
        qdata: (R, K) uint8 codes; (R, K) is `matrix_shape` of the shape.
        scale: (R, ceil(K / 32)) uint8, E8M0.
        multiplier: () float32.
        rounding: the random bits of what is encoded next.
    """

    qdata: Tensor
    scale: Tensor
    multiplier: Tensor
    rounding: Rounding

    handlers = HANDLERS
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
        self: Float8Grad = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=parts.qdata.device
        )
        self.qdata, self.scale, self.multiplier = parts
        self.rounding = rounding or Rounding()
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
            x: bfloat16 or float32, at least one dimension.
            rounding: None: random bits of its own.
            dtype: the dtype as which it reads; None: that of `x`.
            exchanged: whether it is an average over ranks, which all of them round alike.
        """
        rounding = rounding or Rounding()
        keys = rounding.next_exchanged() if exchanged else rounding.next()
        matrix = x.contiguous().view(matrix_shape(x.shape))
        parts = quantize_gradient(matrix, keys)
        return Float8Grad(parts, x.shape, dtype or x.dtype, rounding)

    @torch.no_grad()
    def store(self, x: Tensor, *, exchanged: bool = False) -> None:
        """Encode `x`, of this shape; `exchanged` as of `quantize`."""
        keys = self.rounding.next_exchanged() if exchanged else self.rounding.next()
        encoded = quantize_gradient(self._matrix(x), keys)
        for target, part in zip(self.parts(), encoded, strict=True):
            target.copy_(part)

    def take(self, x: Tensor) -> None:
        parts = quantize_gradient(self._matrix(x), self.rounding.next())
        self.qdata, self.scale, self.multiplier = parts  # aliases keep theirs

    @torch.no_grad()
    def accumulate(self, x: Tensor) -> None:
        """Add `x`, of this shape."""
        accumulate_gradient(self.parts(), self._matrix(x), self.rounding.next())

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of this shape, in `dtype` or this tensor's own."""
        decoded = decode_gradient(self.parts(), dtype or self.dtype)
        # No view: as a gradient, one would keep this memory after its `.data` is exchanged.
        plain: Tensor = _unsafe_view(decoded, self.shape)
        return plain

    def parts(self) -> GradientParts:
        """Codes, scales and multiplier, as an optimizer's step takes them."""
        return GradientParts(self.qdata, self.scale, self.multiplier)

    def alias(self) -> "Float8Grad":
        """Another one with the same parts."""
        return Float8Grad(self.parts(), self.shape, self.dtype, self.rounding)

    def _matrix(self, x: Tensor) -> Tensor:
        if isinstance(x, (Encoded, EncodedView)):
            x = x.dequantize()
        if x.dtype not in (torch.bfloat16, torch.float32):
            x = x.float()
        return x.to(self.device).expand(self.shape).contiguous().view(self.qdata.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale", "multiplier"], (self.shape, self.dtype, self.rounding)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "Float8Grad":
        return Float8Grad(GradientParts(**inner), *context)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Float8Grad":
        parts = GradientParts(*(part.clone() for part in self.parts()))
        return Float8Grad(parts, self.shape, self.dtype, self.rounding.copy())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Float8Grad, (self.parts(), self.shape, self.dtype, self.rounding)

    def __repr__(self) -> str:
        return f"Float8Grad(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _UNSCALE:  # its first argument is a list of gradients of any kind
            return _unscale(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _unscale(grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's: multiply by `inv_scale`, and tell of gradients that are not finite."""
    plain = [g for g in grads if not isinstance(g, Float8Grad)]
    if plain:
        _UNSCALE(plain, found_inf, inv_scale)
    for grad in grads:
        if isinstance(grad, Float8Grad):
            bad = has_nonfinite(grad.parts()).to(found_inf)
            found_inf.copy_(torch.maximum(found_inf, bad.expand_as(found_inf)))
            grad.multiplier.mul_(inv_scale.reshape(()))


_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
