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
from torch_fp8.tensor.float8_grad_ops import HANDLERS

_aten: Any = torch.ops.aten
_FOREACH = "aten::_foreach_"


class Float8Grad(Tensor):
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

    __torch_function__ = torch._C._disabled_torch_function_impl

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
            dtype: that it reads as; None: that of `x`.
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
        made = quantize_gradient(self._matrix(x), keys)
        for target, part in zip(self.parts(), made, strict=True):
            target.copy_(part)

    @torch.no_grad()
    def accumulate(self, x: Tensor) -> None:
        """Add `x`, of this shape."""
        accumulate_gradient(self.parts(), self._matrix(x), self.rounding.next())

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of this shape, in `dtype` or this tensor's own."""
        return decode_gradient(self.parts(), dtype or self.dtype).view(self.shape)

    def parts(self) -> GradientParts:
        """Codes, scales and multiplier, as an optimizer's step takes them."""
        return GradientParts(self.qdata, self.scale, self.multiplier)

    def alias(self) -> "Float8Grad":
        """Another one with the same parts."""
        return Float8Grad(self.parts(), self.shape, self.dtype, self.rounding)

    def _matrix(self, x: Tensor) -> Tensor:
        if isinstance(x, (Float8Grad, Float8GradView)):
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
        memo[id(self)] = result = Float8Grad(parts, self.shape, self.dtype, self.rounding.copy())
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Float8Grad, (self.parts(), self.shape, self.dtype, self.rounding)

    def __repr__(self) -> str:
        return f"Float8Grad(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class Float8GradView(Tensor):
    """A view of a `Float8Grad`, as ``grad[0]`` or ``grad.view(-1)``: reads and writes its base.

    Attributes:
        base: of the view; another view for a view of a view.
        replay: makes the same view of a plain tensor.
    """

    base: "Float8Grad | Float8GradView"
    replay: Any

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, base: Any, replay: Any, like: Tensor) -> "Float8GradView":
        self: Float8GradView = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=base.device
        )
        self.base, self.replay = base, replay
        return self

    def dequantize(self) -> Tensor:
        """A plain tensor of this shape."""
        view: Tensor = self.replay(self.base.dequantize())
        return view

    def store(self, x: Tensor) -> None:
        """Write `x` into the base."""
        dense = self.base.dequantize()
        self.replay(dense).copy_(x)
        self.base.store(dense)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = result = self.dequantize().clone()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{self.dequantize()!r} of {self.base!r}"

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    __torch_dispatch__ = Float8Grad.__torch_dispatch__


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = HANDLERS.get(func)
    if handler is not None and isinstance(args[0], Float8Grad):
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func is _UNSCALE:
        return _unscale(*args)
    if func._schema.name.startswith(_FOREACH):
        return _foreach(func, args, kwargs)
    if _is_view(func) and isinstance(args[0], _OURS):
        return _view(func, args, kwargs)
    return _on_dense(func, args, kwargs)


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


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ours one after the other, so that one at a time is decoded; the rest in one call."""
    count = len(next(a for a in args if isinstance(a, (list, tuple))))

    def at(where: list[int]) -> list[Any]:
        return [[a[i] for i in where] if isinstance(a, (list, tuple)) else a for a in args]

    ours: list[int] = []
    plain: list[int] = []
    for i in range(count):
        lists = [a for a in at([i]) if isinstance(a, list)]
        (ours if any(isinstance(a[0], _OURS) for a in lists) else plain).append(i)
    results: list[Any] = [None] * count
    groups = [(plain, func(*at(plain), **kwargs))] if plain else []
    groups += [([i], _foreach_single(func, at([i]), kwargs)) for i in ours]
    for where, made in groups:
        for i, result in zip(where, made or [None] * len(where), strict=True):
            results[i] = result
    return results if func._schema.returns else None


def _foreach_single(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix(_FOREACH)
    first, *rest = [a[0] if isinstance(a, list) else a for a in args]
    if isinstance(first, Float8Grad):
        if name in _SPECIAL:
            return [getattr(first, name)(*rest, **kwargs)]
        if name == "norm":
            return [torch.linalg.vector_norm(first, *rest, **kwargs)]
    return _on_dense(func, tuple(args), kwargs)


def _is_view(func: Any) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views that write through, of any shape; the template is on the meta device."""
    base = args[0]

    def replay(x: Tensor) -> Any:
        return func(x, *args[1:], **kwargs)

    made = replay(torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta"))
    if isinstance(made, Tensor):
        return Float8GradView(base, replay, made)
    views = enumerate(made)
    return [Float8GradView(base, lambda x, i=i: replay(x)[i], view) for i, view in views]


def _on_dense(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decode what is ours, call, and encode what was written."""
    written: list[tuple[Any, Tensor]] = []
    schema = func._schema.arguments
    by_name = {a.name: _writes(a) for a in schema}
    plain_args = [_dense(a, _writes(s), written) for a, s in zip(args, schema, strict=False)]
    plain_kwargs = {n: _dense(a, by_name.get(n, False), written) for n, a in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for target, value in written:
        target.store(value)
    return _originals(result, written)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _dense(x: Any, writes: bool, written: list[tuple[Any, Tensor]]) -> Any:
    if isinstance(x, _OURS):
        dense = x.dequantize()
        if writes:
            written.append((x, dense))
        return dense
    if isinstance(x, (list, tuple)):
        return [_dense(y, writes, written) for y in x]
    return x


def _originals(result: Any, written: list[tuple[Any, Tensor]]) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_originals(r, written) for r in result)
    return next((target for target, dense in written if dense is result), result)


_SPECIAL = ("mul_", "div_", "add_", "sub_", "zero_", "copy_", "clamp_min_", "clamp_max_")
_OURS = (Float8Grad, Float8GradView)
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
