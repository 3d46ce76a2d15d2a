"""`Encoded`: a tensor that is stored in one form and read in another, like a gradient in 8 bits.

Readers take it for a plain tensor of its shape and dtype. It has no memory of that form:

* any operator that reads it decodes it first, in lists (``torch._foreach_*``) one tensor after the
  other, so that one decoded tensor lives at a time;
* any operator that writes to it decodes it, writes, and encodes the result; a collective that
  writes to it has ended when it returns;
* a view, as ``x[0]`` or ``x.view(-1)``, reads and writes its base (`EncodedView`), whatever its
  geometry;
* an array of NumPy is a decoded copy and read-only, because what is written to it would be lost.

A subclass says how to decode and to encode, and may answer some operators itself (`handlers`).
"""

import math
import operator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_fp8.tensor.leaves_as_copy import LeavesAsCopy
from torch_fp8.tensor.shared_parts import SharedParts, send_shared

_aten: Any = torch.ops.aten
_FOREACH = "aten::_foreach_"


class _Readable(LeavesAsCopy, SharedParts):
    """What a tensor without memory of its own needs to be read and written as a plain one."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def store(self, x: Tensor) -> None:
        """Encode `x`, of this shape."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.is_inference_mode_enabled():  # aliases and views outlive it
            with torch.inference_mode(False), torch.no_grad():
                return _dispatch(func, args, kwargs or {})
        return _dispatch(func, args, kwargs or {})


class Encoded(_Readable):
    """The base of tensors that are stored in another form; see the module.

    Attributes:
        handlers: operators that the class answers itself, beside aliases. Each handler takes the
            operator's arguments, an object of the class first, and returns the result, or
            NotImplemented to have it computed on a decoded tensor.
        foreach_methods: ``torch._foreach_*`` operators, without the prefix, to call as a method.
    """

    handlers: ClassVar[dict[Any, Any]] = {}
    foreach_methods: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        send_shared(cls)

    def alias(self) -> "Encoded":
        """Return another object with the same parts."""
        raise NotImplementedError

    def take(self, x: Tensor) -> None:
        """Hold `x`, of this shape, as ``self.data = x`` asks; `store` writes it by default."""
        self.store(plain(x))

    def become(self, x: Tensor) -> None:
        """Hold `x`, of another shape, dtype or device; refused, unless a class can."""
        raise RuntimeError(
            f"{type(self).__name__} of {self.dtype} {tuple(self.shape)} on {self.device} is stored "
            f"in another form; its .data was set to {x.dtype} {tuple(x.shape)} on {x.device}. "
            "Assign the tensor itself, as in p.grad = x"
        )

    @property
    def data(self) -> Tensor:
        alias: Tensor = torch.Tensor.data.__get__(self)  # with a version of its own
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        same = (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)
        (torch.no_grad()(self.take) if same else self.become)(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)


class EncodedView(_Readable):
    """A view of an `Encoded` tensor.

    Attributes:
        base: the tensor, or another view of it.
        replay: function that makes the same view of a plain tensor.
    """

    base: "Encoded | EncodedView"
    replay: Any

    @staticmethod
    def __new__(cls, base: Any, replay: Any, like: Tensor) -> "EncodedView":
        self: EncodedView = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=base.device,
        )
        self.base, self.replay = base, replay
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        part: Any = self.base
        while isinstance(part, _Readable):
            part = getattr(part, part.__tensor_flatten__()[0][0])
        if type(part) is FunctionalTensor:  # AOTAutograd flattens what leaves its graph
            raise RuntimeError(
                "a view of a tensor that is stored in another form leaves a graph of "
                "torch.compile, where a write to it would be lost; use a copy, x[0].clone(), or "
                "torch.compiler.disable for the function that takes the view"
            )
        return ["base"], self.replay

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], replay: Any, outer_size: Any, outer_stride: Any
    ) -> "EncodedView":
        base = inner["base"]
        return EncodedView(base, replay, replay(_template(base)))

    def dequantize(self) -> Tensor:
        view: Tensor = self.replay(self.base.dequantize())
        return view

    def store(self, x: Tensor) -> None:
        dense = self.base.dequantize()
        self.replay(dense).copy_(x)
        self.base.store(dense)

    def data_ptr(self) -> int:
        """Return the address of this part of the copy whose address the base shows; 0: it has none.

        Writers of files compare addresses to find tensors that overlap.
        """
        start = self._root().data_ptr()
        return start and start + self.storage_offset() * self.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the copy whose address the base shows, if it has one."""
        root = self._root()
        return root.untyped_storage() if root.data_ptr() else super().untyped_storage()

    def _root(self) -> "Encoded":
        base: Encoded | EncodedView = self
        while isinstance(base, EncodedView):
            base = base.base
        return base

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dequantize().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().clone().__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        return f"{self.dequantize()!r} of {self.base!r}"


def plain(x: Tensor) -> Tensor:
    """Return a plain tensor of what may be stored in another form."""
    return x.dequantize() if isinstance(x, (Encoded, EncodedView)) else x


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else None
    if isinstance(first, Encoded):
        handler: Any = _ALIASES.get(func) or first.handlers.get(func)
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func._schema.name.startswith(_FOREACH):
        return _foreach(func, args, kwargs)
    if func.namespace == "c10d":
        return _collective(func, args, kwargs)
    if isinstance(first, _Readable) and _is_view(func):
        return _view(func, args, kwargs)
    return on_dense(func, args, kwargs)


def _view_as_is(x: Encoded, size: Any) -> Any:
    # FSDP2 accumulates into the local tensor of a DTensor, which DTensor.from_local has viewed.
    shape = tuple(size)
    if -1 in shape:
        known = -math.prod(shape)
        shape = tuple(x.numel() // max(known, 1) if s == -1 else s for s in shape)
    return x.alias() if shape == tuple(x.shape) else NotImplemented


def _set(x: Encoded, source: Any) -> Any:
    if source.shape != x.shape:
        return NotImplemented
    x.data = source
    return x


_ALIASES = {
    _aten.set_.source_Tensor: _set,
    _aten.detach.default: operator.methodcaller("alias"),
    _aten.alias.default: operator.methodcaller("alias"),
    _aten.view.default: _view_as_is,
    _aten._unsafe_view.default: _view_as_is,
}


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operator for encoded tensors one after the other, and once for the rest."""
    count = len(next(a for a in args if isinstance(a, (list, tuple))))

    def at(where: list[int]) -> list[Any]:
        return [[a[i] for i in where] if isinstance(a, (list, tuple)) else a for a in args]

    encoded: list[int] = []
    plain: list[int] = []
    for i in range(count):
        lists = [a for a in at([i]) if isinstance(a, list)]
        (encoded if any(isinstance(a[0], _Readable) for a in lists) else plain).append(i)
    results: list[Any] = [None] * count
    groups = [(plain, func(*at(plain), **kwargs))] if plain else []
    groups += [([i], _foreach_single(func, at([i]), kwargs)) for i in encoded]
    for where, outputs in groups:
        for i, result in zip(where, outputs or [None] * len(where), strict=True):
            results[i] = result
    return results if func._schema.returns else None


def _foreach_single(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix(_FOREACH)
    if name.endswith("_"):  # torch counts the writes of other operators itself
        torch.autograd.graph.increment_version(args[0])
    first, *rest = [a[0] if isinstance(a, list) else a for a in args]
    if isinstance(first, Encoded):
        if name in first.foreach_methods:
            return [getattr(first, name)(*rest, **kwargs)]
        if name == "norm":
            return [torch.linalg.vector_norm(first, *rest, **kwargs)]
    return on_dense(func, tuple(args), kwargs)


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a collective, whose schema does not say that it writes to its first argument."""
    written: list[tuple[Any, Tensor]] = []
    writes = "send" not in func._schema.name
    plain_args = [_dense(a, writes and i == 0, written) for i, a in enumerate(args)]
    result = func(*plain_args, **kwargs)
    if written:
        for work in result if isinstance(result, tuple) else (result,):
            if isinstance(work, torch.ScriptObject):
                work.wait()
    for target, value in written:
        target.store(value)
    return _originals(result, written)


def _is_view(func: Any) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


def _template(base: Tensor) -> Tensor:
    """Return a meta tensor with the geometry of `base`, its place in the memory included."""
    offset, stride = base.storage_offset(), base.stride()
    steps = (step * (size - 1) for size, step in zip(base.shape, stride, strict=True) if size)
    memory = torch.empty(offset + 1 + sum(steps), dtype=base.dtype, device="meta")
    return memory.as_strided(base.shape, stride, offset)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a view of any geometry that writes through; its template is on the meta device."""
    base = args[0]

    def replay(x: Tensor) -> Any:
        return func(x, *args[1:], **kwargs)

    views = replay(_template(base))
    if isinstance(views, Tensor):
        return EncodedView(base, replay, views)
    return [EncodedView(base, lambda x, i=i: replay(x)[i], v) for i, v in enumerate(views)]


def on_dense(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decode what an operator reads, call it, and encode what it has written."""
    written: list[tuple[Any, Tensor]] = []
    schema = func._schema.arguments
    by_name = {a.name: _writes(a) for a in schema}
    plain_args = [_dense(a, _writes(s), written) for a, s in zip(args, schema, strict=False)]
    plain_kwargs = {n: _dense(a, by_name.get(n, False), written) for n, a in kwargs.items()}
    if written and torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"{func._schema.name} changes the geometry in place of a tensor that is stored in "
            "another form; take a view or a copy, x.t() or x.clone()"
        )
    result = func(*plain_args, **plain_kwargs)
    for target, value in written:
        target.store(value)
    return _originals(result, written)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _dense(x: Any, writes: bool, written: list[tuple[Any, Tensor]]) -> Any:
    if isinstance(x, _Readable):
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
