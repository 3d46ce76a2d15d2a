"""`Encoded`: a tensor stored in another form than it reads as, such as a gradient in 8 bits.

It acts like a plain tensor of its shape and dtype, without memory for it:

* An operator that reads it decodes it first. In lists (``torch._foreach_*``) this happens one
  tensor at a time, so that only one decoded tensor exists at once.
* An operator that writes to it decodes it, writes, and encodes the result. A collective that writes
  to it is complete when it returns.
* A view of any geometry, such as ``x[0]`` or ``x.view(-1)``, reads and writes its base
  (`EncodedView`).
* A NumPy array is a read-only decoded copy, because writes to it would be lost.

A subclass defines how to decode and encode, and may implement some operators itself (`handlers`).
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator
from contextvars import ContextVar
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_fp8.autograd.function import outside_inference_mode
from torch_fp8.tensor.base import wrapper
from torch_fp8.tensor.readable import (
    Readable,
    collective,
    on_dense,
    plain,
    reduce_shared,
    refuse_swap,
    refuse_to_leave,
    refuse_write_in_graph,
)

_aten: Any = torch.ops.aten
_FOREACH = "aten::_foreach_"
_FUSED = "aten::_fused_"
LIST_HANDLERS: dict[Any, Any] = {}
"""Functions for operators whose first argument is a list of tensors, some of them encoded."""
_refused: ContextVar[str | None] = ContextVar("refused", default=None)


@contextlib.contextmanager
def refused_addresses(reader: str | None) -> Iterator[None]:
    """Refuse the address of any `Encoded` tensor in this context: writes there would be lost.

    Args:
        reader: name of the optimizer that runs, for the error, or None to allow addresses again.
    """
    token = _refused.set(reader)
    try:
        yield
    finally:
        _refused.reset(token)


def check_address() -> None:
    """Raise RuntimeError within `refused_addresses`."""
    reader = _refused.get()
    if reader is not None:
        raise RuntimeError(
            f"{reader} asks for the address of a weight, gradient or state that is stored in fewer "
            "bits, to write to it past PyTorch's operators; keep the weights and gradients as they "
            "are with FP8Config(split_weights=False)"
        )


class Encoded(Readable):
    """Base of tensors that are stored in another form; see the module docstring.

    Attributes:
        handlers: functions for operators, other than aliases, that the class implements itself. A
            handler takes the operator's arguments, with an object of the class first, and returns
            the result, or NotImplemented to run the operator on a decoded tensor.
        foreach_methods: names of ``torch._foreach_*`` operators, without prefix, that are called as
            methods.
    """

    handlers: ClassVar[dict[Any, Any]] = {}
    foreach_methods: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        ForkingPickler.register(cls, reduce_shared)

    def alias(self) -> "Encoded":
        """Return another object with the same parts."""
        raise NotImplementedError

    def take(self, x: Tensor) -> None:
        """Implement ``self.data = x`` for x of the same shape; the default is `store`."""
        self.store(plain(x))

    def become(self, x: Tensor) -> None:
        """Implement ``self.data = x`` for another shape, dtype or device; the default raises."""
        raise RuntimeError(
            f"{type(self).__name__} of {self.dtype} {tuple(self.shape)} on {self.device} is stored "
            f"in another form; its .data was set to {x.dtype} {tuple(x.shape)} on {x.device}. "
            "Assign the tensor itself, as in p.grad = x"
        )

    def data_ptr(self) -> int:
        check_address()
        return super().data_ptr()

    @property
    @torch._disable_dynamo  # Dynamo follows the descriptor back to this property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)  # an alias with its own version counter

    @data.setter
    def data(self, value: Tensor) -> None:
        same = (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)
        outside_inference_mode(torch.no_grad()(self.take) if same else self.become)(value)

    def _use_count(self) -> int:  # torch.utils.swap_tensors calls this before it changes anything
        refuse_swap(self)
        return super()._use_count()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)

    @classmethod
    @torch._disable_dynamo  # imports torch._dynamo at the first call
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_inference_mode_enabled():
            return _dispatch(func, args, kwargs or {})
        with torch.inference_mode(False), torch.no_grad():  # aliases and views outlive it
            result = func.decompose(*args, **kwargs or {})  # autograd does so elsewhere
            return _dispatch(func, args, kwargs or {}) if result is NotImplemented else result


class EncodedView(Readable):
    """A view of an `Encoded` tensor.

    It has no ``__tensor_flatten__``, so that code that takes it runs without torch.compile.

    Attributes:
        base: encoded tensor, or another view of it.
        root: encoded tensor.
        replay: function that makes the same view of a plain tensor.
    """

    base: "Encoded | EncodedView"
    root: Encoded
    replay: Any
    __torch_dispatch__ = Encoded.__torch_dispatch__

    @staticmethod
    def __new__(cls, base: Any, replay: Any, like: Tensor) -> "EncodedView":
        layout = {"strides": like.stride(), "storage_offset": like.storage_offset()}
        self: EncodedView = wrapper(cls, like.shape, like.dtype, base.device, **layout)
        self.base, self.replay = base, replay
        self.root = base.root if isinstance(base, EncodedView) else base
        return self

    def dequantize(self) -> Tensor:
        return self.replay(self.base.dequantize())

    def writable(self) -> Tensor:
        return self.replay(self.base.writable())

    def store(self, x: Tensor) -> None:
        self.finish_write(x, _aten.copy_.default)

    def finish_write(self, x: Tensor, func: Any) -> None:
        dense = self.base.writable()
        self.replay(dense).copy_(x)
        self.base.finish_write(dense, func)

    def data_ptr(self) -> int:
        """Return the address of this view in the base's decoded copy, or 0 if there is no copy.

        Code that writes files compares addresses to find tensors that overlap.
        """
        start = self.root.data_ptr()
        return start and start + self.storage_offset() * self.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the base's decoded copy, if it has one."""
        root = self.root
        return root.untyped_storage() if root.data_ptr() else super().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dequantize().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().clone().__reduce_ex__(protocol)

    def stored_part(self) -> Tensor:
        return self.root.stored_part()

    def share_memory_(self) -> Tensor:
        self.root.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.root.is_shared()

    def __repr__(self, **options: Any) -> str:
        return f"{self.dequantize()!r} of {self.base!r}"


class _TracedView(EncodedView):
    """A view that a graph of torch.compile makes and uses."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        refuse_to_leave(self)
        return ["base"], self.replay

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], replay: Any, outer_size: Any, outer_stride: Any
    ) -> EncodedView:
        base = inner["base"]
        return _TracedView(base, replay, replay(_template(base)))


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func._schema.is_mutable:
        refuse_write_in_graph(func, args)
    first = args[0] if args else None
    if isinstance(first, list) and func in LIST_HANDLERS:
        return LIST_HANDLERS[func](*args)
    if isinstance(first, Encoded):
        handler: Any = _ALIASES.get(func) or first.handlers.get(func)
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    name = func._schema.name
    if name.startswith(_FOREACH) or (name.startswith(_FUSED) and isinstance(first, list)):
        return _foreach(func, args, kwargs)
    if func.namespace == "c10d":
        return collective(func, args, kwargs)
    if isinstance(first, Readable) and _is_view(func):
        return _view(func, args, kwargs)
    return on_dense(func, args, kwargs)


def _view_as_is(x: Encoded, size: Any) -> Any:
    # FSDP2 accumulates into a DTensor's local tensor, of which DTensor.from_local made a view.
    is_same = len(size) == x.ndim and all(s in (-1, n) for s, n in zip(size, x.shape, strict=True))
    return x.alias() if is_same else NotImplemented


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
    """Call the operator once for each encoded tensor, and once for all plain tensors."""

    def at(where: list[int]) -> list[Any]:
        # An optional list of a fused step is empty.
        return [[a[i] for i in where if a] if isinstance(a, (list, tuple)) else a for a in args]

    entries = list(zip(*(a for a in args if isinstance(a, (list, tuple)) and a), strict=True))
    encoded = [any(isinstance(x, Readable) for x in entry) for entry in entries]
    others = [i for i, is_encoded in enumerate(encoded) if not is_encoded]
    outputs = func(*at(others), **kwargs) if others else None
    results = dict(zip(others, outputs or (), strict=False))
    for i in itertools.compress(range(len(entries)), encoded):
        results[i] = (_foreach_single(func, at([i]), kwargs) or [None])[0]
    return [results[i] for i in range(len(entries))] if func._schema.returns else None


def _foreach_single(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix(_FOREACH)
    if name.endswith("_"):  # for other operators, torch increments the version
        torch.autograd.graph.increment_version(args[0])
    first, *rest = [a[0] if isinstance(a, list) and a else a for a in args]
    if isinstance(first, Encoded):
        if name in first.foreach_methods:
            return [getattr(first, name)(*rest, **kwargs)]
        if name == "norm":
            return [torch.linalg.vector_norm(first, *rest, **kwargs)]
    return on_dense(func, tuple(args), kwargs)


@functools.cache
def _is_view(func: Any) -> bool:
    """Return whether an operator returns views of its first argument and writes nothing."""
    aliases = [r.alias_info for r in func._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


def _template(base: Tensor) -> Tensor:
    """Return a meta tensor with the geometry of `base`, including its storage offset."""
    offset, stride = base.storage_offset(), base.stride()
    steps = (step * (size - 1) for size, step in zip(base.shape, stride, strict=True) if size)
    memory = torch.empty(offset + 1 + sum(steps), dtype=base.dtype, device="meta")
    return memory.as_strided(base.shape, stride, offset)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a write-through view of any geometry, by running `func` on a meta template."""
    base = args[0]

    def replay(x: Tensor) -> Any:
        return func(x, *args[1:], **kwargs)

    views = replay(_template(base))
    cls = _TracedView if base.is_traced() else EncodedView
    if isinstance(views, Tensor):
        return cls(base, replay, views)
    return [cls(base, lambda x, i=i: replay(x)[i], v) for i, v in enumerate(views)]
