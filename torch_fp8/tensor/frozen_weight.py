"""`Float8FrozenWeight`: a frozen weight that is stored as FP8 only, one byte per element.

``W ~= qdata.float() * scale``: E4M3 with a scale for each 128 x 128 elements, or one for all. fprop
multiplies by these bytes, and dgrad by their transpose, made when needed. There is no 16-bit copy.
Scales computed by this package are powers of two, so that BF16 holds every value exactly. Reading
the weight gives a plain BF16 tensor, and quantizing that again gives the same values.

Writes are not lost. In-place operations, also through views and ``.data``, run on the float32
values, which are then quantized again; so does ``p.data = x``. A view is stored as the chain of
operators that make it. To train the weight, thaw it: ``requires_grad_(True)`` does so, with a
warning, if a layer owns it.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.ops.quantize import transposed
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.base import (
    Payloads,
    QuantizableTensor,
    dequantized,
    map_tensors,
    written_values,
)
from torch_fp8.tensor.encoded import is_view, template
from torch_fp8.tensor.frozen_payload import DTYPE, FrozenPayload
from torch_fp8.tensor.frozen_writes import refuse_merge, write_change
from torch_fp8.tensor.halves import VERSIONS
from torch_fp8.tensor.shared_parts import SharedParts, send_shared

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class _Step:
    """One operator in the chain of a view; `index` selects one of several results."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        value = self.func(x, *self.args, **self.kwargs)
        result: Tensor = value if self.index is None else value[self.index]
        return result


class Float8FrozenWeight(SharedParts, QuantizableTensor):
    """A weight (R, C), or a view of one, that is stored in FP8 and reads as BF16.

    Attributes:
        payload: bytes of the weight, shared with all views.
        chain: operators that make this view of the whole weight; empty for the weight itself.
    """

    payload: FrozenPayload
    chain: tuple[_Step, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        payload: FrozenPayload,
        chain: tuple[_Step, ...] = (),
        like: Tensor | None = None,
        requires_grad: bool = False,
    ) -> "Float8FrozenWeight":
        if isinstance(payload, Tensor):
            # For each move, Accelerate's offloading makes a new Parameter of the old one's class.
            plain: Any = nn.Parameter(payload, requires_grad=requires_grad)
            return plain
        shape = payload.qdata if like is None else like
        self: Float8FrozenWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            shape.shape,
            strides=shape.stride(),
            storage_offset=shape.storage_offset(),
            dtype=DTYPE,
            device=payload.qdata.device,
        )
        self.payload, self.chain = payload, chain
        return self

    def quantize(
        self, quantizer: Any, *, rowwise: bool, columnwise: bool, grad_output: Tensor | None = None
    ) -> Payloads:
        """Return the stored payload (R, C), and its transpose (C, R), as requested."""
        return frozen_payloads(self, quantizer.spec, rowwise, columnwise, grad_output)

    def dequantize(self) -> Tensor:
        """Return a plain BF16 tensor of this shape."""
        return self.of_whole(self.payload.dequantize())

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return this view of a whole tensor (R, C)."""
        for step in self.chain:
            whole = step(whole)
        return whole

    @property
    def qdata(self) -> Tensor:
        return self.payload.qdata

    @property
    def scale(self) -> Tensor:
        return self.payload.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        payload = self.payload
        return ["qdata", "scale"], (payload.spec, payload.name, payload.thawed_dtype, self.chain)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "Float8FrozenWeight":
        spec, name, dtype, chain = context
        payload = FrozenPayload(inner["qdata"], inner["scale"], spec, name, dtype)
        whole = Float8FrozenWeight(payload)
        if not chain:
            return whole
        return Float8FrozenWeight(payload, chain, whole.of_whole(template(whole)))

    @property
    def data(self) -> Tensor:
        """An alias of the weight, whose writes are quantized again."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        name = self.payload.name
        if self.chain or value.shape != self.shape or value.device != self.device:
            raise RuntimeError(
                f"{name} is stored in FP8 only, {tuple(self.shape)} on {self.device}; its .data "
                f"was set to {tuple(value.shape)} on {value.device}. Move the module, or restore "
                "the weight's own dtype first: torch_fp8.thaw(model)"
            )
        refuse_merge(own := self.payload)
        if own.rewrite is not None:  # a shard: all ranks write together
            self.copy_(value)
        elif not _has_form(value, own.spec):
            self.payload = own.of_values(dequantized(value))
        elif value.payload.owner == own.owner:
            self.payload = value.payload  # from an alias of this weight
        else:
            self.payload = own.of_bytes(value.qdata.clone(), value.scale.clone())

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the bytes, for code that counts or compares memory.

        torch itself (torch.compile) expects a storage of the BF16 size and gets the wrapper's own.
        """
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return super().untyped_storage()
        return self.payload.qdata.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the bytes."""
        return self.payload.qdata.data_ptr()

    @property
    def requires_grad(self) -> bool:
        """Always False: a frozen weight is not trained."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> "Float8FrozenWeight":
        """Thaw the weight in place if `requires_grad` is True.

        Raises:
            RuntimeError: no layer owns the weight, or it is sharded or a view.
        """
        if not requires_grad:
            return self
        owner = None if self.payload.owner is None else self.payload.owner()
        if owner is None or self.chain:
            raise RuntimeError(
                f"{self.payload.name} is stored in FP8 only and cannot be trained; restore its own "
                "dtype first: torch_fp8.thaw(model)"
            )
        owner.thaw_for_training()
        return self  # now a plain Parameter

    @property
    def grad(self) -> None:
        """Always None: a frozen weight has no gradient."""
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(
                f"{self.payload.name} is stored in FP8 only and takes no gradient; thaw it before "
                "you train it: torch_fp8.thaw(model)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if self.chain:
            copied: Tensor = self.dequantize().clone()
        else:
            copied = frozen_parameter(self.payload.copied())
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.dequantize()
        whole = nn.Parameter(plain, requires_grad=False) if is_parameter(self) else plain
        return whole.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        cast = f"{self.payload.spec}, view" if self.chain else f"{self.payload.spec}"
        return f"Float8FrozenWeight(shape={tuple(self.shape)}, {cast})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # views outlive it
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        if args and isinstance(args[0], cls) and is_view(func):
            return _view(args[0], func, args[1:], kwargs)
        if func is _aten.copy_.default and _same_bytes(*args[:2]):
            return args[0]
        values = (x for x in written_values(func, args, kwargs) if isinstance(x, cls))
        written = {id(x.payload): x.payload for x in values}
        for payload in written.values():
            refuse_merge(payload)
        whole = {key: payload.dequantize(torch.float32) for key, payload in written.items()}
        own: dict[int, Any] = {}  # id of a float32 part -> (part, weight that it represents)

        def plain(value: Any) -> Any:
            if not isinstance(value, QuantizableTensor):
                return value
            if not isinstance(value, cls) or id(value.payload) not in whole:
                return value.dequantize()
            part = value.of_whole(whole[id(value.payload)])
            own[id(part)] = (part, value)
            return part

        result = func(*map_tensors(args, plain), **map_tensors(kwargs, plain))
        for key, payload in written.items():
            write_change(payload, whole[key], func)
        return map_tensors(result, lambda x: own[id(x)][1] if id(x) in own else x)


send_shared(Float8FrozenWeight)


def frozen_parameter(payload: FrozenPayload) -> nn.Parameter:
    """Return a Parameter of class `Float8FrozenWeight` over these bytes."""
    return nn.Parameter(Float8FrozenWeight(payload), requires_grad=False)


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a frozen weight is a Parameter, and not a view."""
    return bool(getattr(tensor, "_is_param", False))


# A function, because torch.compile would treat a method of a tensor as an operator.
def frozen_payloads(
    weight: Float8FrozenWeight,
    spec: CastSpec,
    rowwise: bool,
    columnwise: bool,
    grad_output: Tensor | None,
) -> Payloads:
    """Return the payload (R, C), and its transpose (C, R), each one or None.

    Args:
        weight: whole weight (R, C).
        spec: format and granularity that the layer needs; they must be those of the weight.
        rowwise, columnwise: whether to return the payload, and the transpose.
        grad_output: gradient in backward, or None; see `torch_fp8.ops.quantize.transposed`.
    """
    stored = weight.payload.quantized
    if spec.granularity != stored.granularity:
        raise RuntimeError(
            f"{weight.payload.name} is stored as FP8 with {stored.granularity} scales, but its "
            f"layer needs {spec.granularity}: convert the model again, or torch_fp8.thaw(model)"
        )
    turned = transposed(stored, grad_output) if columnwise else None
    return stored if rowwise else None, turned


def _view(weight: Float8FrozenWeight, func: Any, args: Any, kwargs: Any) -> Any:
    if func in (_aten.detach.default, _aten.alias.default):
        return Float8FrozenWeight(weight.payload, weight.chain, template(weight))
    geometry = func(template(weight), *args, **kwargs)
    several = isinstance(geometry, (list, tuple))
    views = [
        Float8FrozenWeight(
            weight.payload, (*weight.chain, _Step(func, args, kwargs, i if several else None)), like
        )
        for i, like in enumerate(geometry if several else [geometry])
    ]
    return views if several else views[0]


def _has_form(x: Any, spec: CastSpec) -> bool:
    """Return whether `x` is a whole frozen weight with the cast `spec`."""
    return isinstance(x, Float8FrozenWeight) and not x.chain and x.payload.spec == spec


def _same_bytes(target: Any, source: Any) -> bool:
    """Copy a whole frozen weight to another one of the same form; return False if they differ."""
    spec = target.payload.spec if isinstance(target, Float8FrozenWeight) else None
    if spec is None or not (_has_form(target, spec) and _has_form(source, spec)):
        return False
    if target.shape != source.shape or target.payload.rewrite is not None:
        return False
    if target.qdata.data_ptr() == source.qdata.data_ptr():
        return True
    target.payload.take_own_memory()
    target.payload.version = next(VERSIONS)
    target.qdata.view(torch.uint8).copy_(source.qdata.view(torch.uint8))
    target.scale.copy_(source.scale)
    return True
