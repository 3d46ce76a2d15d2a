"""`Readable`: a tensor without plain memory that is decoded to be read and encoded when written.

torch refuses to swap the implementations of two tensors (`swappable`) if C++ code has weak
references to one. torch.profiler keeps one for each tensor that it has recorded with
``record_shapes`` or ``with_stack``, until the profiler is freed. ``torch.utils.swap_tensors``
changes both classes before it is refused, which leaves a tensor that nothing can read. So call
`swappable` before you change anything.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch._subclasses.functional_tensor import FunctionalTensor

REFERRED = "torch.profiler refers to them"
"""Reason why weights keep their form."""


class Readable(Tensor):
    """Base of tensors without plain memory that read and write like plain ones.

    Lists, NumPy arrays and DLPack receive a decoded copy. ``__tensor_flatten__`` names the parts in
    which the tensor is stored. As with a plain tensor, torch's multiprocessing moves what it sends
    into shared memory, so that both processes read and write the same parts.
    """

    __torch_function__ = nn.Parameter.__torch_function__
    __tensor_flatten__: Any
    __tensor_unflatten__: Any

    def dequantize(self) -> Tensor:
        """Return a plain tensor of this shape and dtype."""
        raise NotImplementedError

    def store(self, x: Tensor) -> None:
        """Encode `x`, of this shape."""
        raise NotImplementedError

    def share_memory_(self) -> Tensor:
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(getattr(self, name).is_shared() for name in self.__tensor_flatten__()[0])

    def stored_part(self) -> Tensor:
        """Return one of the plain tensors in which this tensor is stored."""
        return getattr(self, self.__tensor_flatten__()[0][0])

    def is_traced(self) -> bool:
        """Return whether torch.compile traces this tensor."""
        return type(self.stored_part()) in (FakeTensor, FunctionalTensor)

    def writable(self) -> Tensor:
        """Return a plain tensor of this shape, perhaps of a wider dtype, for an operator to write.

        Call `finish_write` with it afterwards.
        """
        return self.dequantize()

    def finish_write(self, x: Tensor, func: Any) -> None:
        """Encode `x`, the result of `writable` after `func` wrote to it."""
        self.store(x)

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self.dequantize().__dlpack__(**options)  # a copy, which does not write through

    def __format__(self, spec: str) -> str:
        return format(self.dequantize(), spec) if spec else str(self)

    def numpy(self, **options: Any) -> Any:
        array = self.dequantize().numpy(**options)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, **options: Any) -> Any:
        return self.numpy().__array__(dtype, **options)


def reduce_shared(tensor: Readable) -> Any:
    """Reduce a tensor for multiprocessing: to its own form, with shared memory."""
    if tensor.device.type != "cpu":
        return tensor.__reduce_ex__(2)
    with torch.no_grad():
        tensor.share_memory_()
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    is_parameter = isinstance(tensor, nn.Parameter)
    return _rebuild, (type(tensor), parts, context, tensor.requires_grad, is_parameter)


def _rebuild(cls: Any, parts: Any, context: Any, requires_grad: bool, is_parameter: bool) -> Any:
    tensor = cls.__tensor_unflatten__(parts, context, None, None)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor


def plain(x: Tensor) -> Tensor:
    """Decode a `Readable` tensor; return any other tensor unchanged."""
    return x.dequantize() if isinstance(x, Readable) else x


def swappable(tensor: Tensor) -> bool:
    """Return whether torch can swap a tensor's implementation, by swapping it back and forth."""
    other = torch.empty(0, dtype=torch.float32, device="cpu")
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:
        return False
    torch._C._swap_tensor_impl(tensor, other)
    return True


def refuse_swap(tensor: Tensor) -> None:
    """Raise RuntimeError if torch cannot swap a tensor's implementation."""
    if not swappable(tensor):
        raise RuntimeError(
            f"a {tensor.dtype} weight {tuple(tensor.shape)} cannot be stored in another form, "
            "because torch.profiler has recorded it with record_shapes or with_stack and refers to "
            "it. The weight is unchanged. Change it before you profile, or after you have deleted "
            "the profiler object"
        )


def refuse_to_leave(x: Readable) -> None:
    """Raise RuntimeError if AOTAutograd flattens x, as it does if x leaves its graph."""
    if type(x.stored_part()) is FunctionalTensor:
        raise RuntimeError(
            "a view of a tensor that is stored in another form leaves a torch.compile graph, "
            "where a write to it would be lost; use a copy, x[0].clone(), or "
            "torch.compiler.disable for the function that takes the view"
        )


def refuse_write_in_graph(func: Any, args: tuple[Any, ...]) -> None:
    """Break a graph of torch.compile at an operator that writes, so that eager code encodes."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if is_written(argument) and isinstance(x, Readable) and x.is_traced():
                raise UnsupportedOperatorException(f"{func} to a {type(x).__name__}")


def collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a collective. It writes to its first argument, although its schema does not say so."""
    written: list[tuple[Any, Tensor]] = []
    writes = "send" not in func._schema.name
    # In the tensor's own dtype, which the other ranks expect.
    plain_args = [_dense(a, writes and i == 0, written, wide=False) for i, a in enumerate(args)]
    result = func(*plain_args, **kwargs)
    if written:
        for work in result if isinstance(result, tuple) else (result,):
            if isinstance(work, torch.ScriptObject):
                work.wait()
    for target, value in written:
        target.store(value)
    return _originals(result, written)


def on_dense(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decode an operator's arguments, call it, and encode the tensors that it wrote."""
    written: list[tuple[Any, Tensor]] = []
    schema = func._schema.arguments
    by_name = {a.name: is_written(a) for a in schema}
    plain_args = [_dense(a, is_written(s), written) for a, s in zip(args, schema, strict=False)]
    plain_kwargs = {n: _dense(a, by_name.get(n, False), written) for n, a in kwargs.items()}
    if written and torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"{func._schema.name} changes the shape or strides in place of a tensor that is stored "
            "in another form; use a view or a copy, x.t() or x.clone()"
        )
    if any(target.dtype != value.dtype for target, value in written):
        plain_args = [_widened(a, written) for a in plain_args]
        plain_kwargs = {name: _widened(a, written) for name, a in plain_kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for target, value in written:
        target.finish_write(value, func)
    return _originals(result, written)


def is_written(argument: Any) -> bool:
    """Return whether an operator writes to an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _dense(x: Any, writes: bool, written: list[tuple[Any, Tensor]], wide: bool = True) -> Any:
    """Decode an argument, with `writable` if `wide`, and add it to `written` if `writes`."""
    if isinstance(x, Readable):
        dense = x.writable() if writes and wide else x.dequantize()
        if writes:
            written.append((x, dense))
        return dense
    return [_dense(y, writes, written, wide) for y in x] if isinstance(x, (list, tuple)) else x


def _widened(x: Any, written: list[tuple[Any, Tensor]]) -> Any:
    """Cast what an operator reads to the dtype of what it writes: ``lerp_`` takes no other."""
    if isinstance(x, (list, tuple)):
        return [_widened(y, written) for y in x]
    if not isinstance(x, Tensor) or any(x is value for _, value in written):
        return x
    return x.to({target.dtype: value.dtype for target, value in written}.get(x.dtype, x.dtype))


def _originals(result: Any, written: list[tuple[Any, Tensor]]) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_originals(r, written) for r in result)
    return next((target for target, dense in written if dense is result), result)
