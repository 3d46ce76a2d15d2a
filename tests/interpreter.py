"""Triton's interpreter, mended: it runs with any NumPy, and in a third of the time.

For processes of their own, in which ``TRITON_INTERPRET=1`` was set before Triton was imported: the
tests' cases, and the counts of bytes and launches (`benchmarks.evidence.launches`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

OWN = {"fp32", "int1", "uint8", "int32", "uint32", "int64"}
"""The types of which two operands make a result of the same."""
SUMS = {"__add__": "add", "__sub__": "sub", "__mul__": "mul"}
BITS = {"__and__": "and", "__or__": "or", "__xor__": "xor"}


def _fp8_bytes(x: Any, E5M2: Any) -> Any:
    kind = tl.float8e5 if getattr(E5M2, "value", E5M2) else tl.float8e4nv
    return x.to(kind).to(tl.uint8, bitcast=True)


ASSEMBLY: dict[str, Callable] = {
    "fp8_bytes": _fp8_bytes,
    "fast_sigmoid": lambda x: 1.0 / (1.0 + tl.exp(-x)),
    "_approximate_reciprocal": lambda x: 1.0 / x,
}
"""What runs here instead of the functions of `torch_fp8.kernels` that are assembly."""


def mend() -> None:
    """Replace functions of the interpreter for the rest of the process.

    A scalar is an array of shape (1,) there, of which int() fails with NumPy >= 2.4. All else here
    saves time, of which most goes into the types of blocks, not into their values.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy_2(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy_2
    _without_unread_checks()
    _patch_once()
    _patch_with_less_between()
    _share_types()
    _share_operands()
    _shift_bfloat16()
    _compare_to_bits()


def _without_unread_checks() -> None:
    """Every sum of integers is made once more in 64 bits, for an assertion that is off."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once() -> None:
    """Once for each module with a function that a kernel calls, and for all launches."""
    patch_language = interpreter._patch_lang
    patched: set[int] = set()

    class Kept(interpreter._LangPatchScope):
        def restore(self) -> None:
            pass

    def patch_language_once(function: Callable) -> Any:
        module = function.__globals__
        if id(module) not in patched:
            patched.add(id(module))
            patch_language(function)
            for name, stub in ASSEMBLY.items():
                if isinstance(module.get(name), interpreter.InterpretedFunction):
                    module[name] = stub
        return kept

    kept = Kept()
    interpreter._patch_lang = patch_language_once


def _patch_with_less_between() -> None:
    """An operation of the language is called without the two functions that only pass it on."""
    semantic = interpreter.interpreter_semantic
    checked = core.add.__code__  # `core.builtin` looks whether there is a semantic
    found: dict[Any, list[tuple[str, Callable]]] = {}

    def interpreted(member: Any) -> Callable:
        code = getattr(
            member, "__code__", None
        )  # a class, such as that of block pointers, has none
        called = member.__wrapped__ if code is checked else member
        if member.__name__ in SUMS or member.__name__ in BITS:
            return _two_operands(member.__name__, called)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return called(*args, **kwargs)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            members = interpreter.inspect.getmembers(package, core.is_builtin)
            found[package] = [(name, interpreted(member)) for name, member in members]
        for name, function in found[package]:
            scope.set_attr(package, name, function)

    interpreter._patch_builtin = patch_builtin


def _two_operands(name: str, called: Callable) -> Callable:
    """Return the method of a tensor for an operation on two, such as ``__add__``.

    Args:
        name: of it.
        called: the language's own, for operands that are not of `OWN` types.
    """
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    tensor = core.tensor
    flags = {"__add__": (True, True), "__sub__": (True, False)}.get(name, ())
    of_integers = f"create_{(SUMS | BITS)[name]}"
    of_floats = f"create_f{SUMS[name]}" if name in SUMS else ""

    def call(self: Any, other: Any) -> Any:
        # Numbers may become a type of their own; those are left to the language.
        if self.dtype.name in OWN and type(other) is tensor and other.dtype.name in OWN:
            left, right = semantic.binary_op_type_checking_impl(self, other, *flags)
            made_by = of_floats if left.dtype.name == "fp32" else of_integers
            if made_by and left.dtype is right.dtype:
                return tensor(getattr(builder, made_by)(left.handle, right.handle), left.type)
        return called(self, other, _semantic=semantic)

    return call


def _share_types() -> None:
    """There is one type for all blocks of a shape and element, and it is also its own IR."""
    blocks: dict[tuple, core.block_type] = {}
    numpy_types: dict[str, np.dtype] = {}
    make_block, numpy_type = core.block_type.__init__, interpreter._get_np_dtype

    def block(cls: Any, element: Any, shape: Any) -> Any:
        sizes = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        key = element.name, sizes
        made = blocks.get(key)
        if made is None:
            made = object.__new__(cls)
            make_block(made, element, shape)
            blocks[key] = made
        return made

    def start_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        try:
            self.dtype, self.shape, self.numel = type.of_tensors
        except AttributeError:
            start(self, handle, type)
            type.of_tensors = self.dtype, self.shape, self.numel

    def numpy_type_of(type: Any) -> np.dtype:
        found = numpy_types.get(type.name)
        if found is None:
            found = numpy_types[type.name] = numpy_type(type)
        return found

    start = core.tensor.__init__
    core.block_type.__new__ = block
    core.block_type.__init__ = lambda self, element, shape: None
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = start_tensor
    interpreter._get_np_dtype = numpy_type_of


def _share_operands() -> None:
    """What operands become depends on their types alone: it is found out once for each pair.

    NumPy spreads an operand of fewer elements over the other, so that this is left to it.
    """
    semantic, tensor = type(interpreter.interpreter_semantic), core.tensor
    check, broadcast, cast = (
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
        semantic.cast,
    )
    numbers: dict[tuple, Any] = {}
    pairs: dict[tuple, tuple[Any, Any]] = {}

    def check_once(self: Any, lhs: Any, rhs: Any, *flags: bool, **more: bool) -> Any:
        if type(lhs) is not tensor:
            return check(self, lhs, rhs, *flags, **more)
        if type(rhs) is tensor:
            if lhs.type is rhs.type and lhs.dtype.name in OWN:
                return lhs, rhs
            key = lhs.type.name, rhs.type.name, flags, *more.items()
            types = pairs.get(key)
            if types is None:
                left, right = check(self, lhs, rhs, *flags, **more)
                pairs[key] = left.type, right.type
                return left, right
            return of_type(self, lhs, types[0]), of_type(self, rhs, types[1])
        if type(rhs) not in (int, float) or lhs.dtype.name not in OWN:
            return check(self, lhs, rhs, *flags, **more)
        if type(rhs) is float and rhs == 0:  # there are two zeros
            return check(self, lhs, rhs, *flags, **more)
        key = lhs.type.name, type(rhs), rhs, flags, *more.items()
        found = numbers.get(key)
        if found is not None:
            return lhs, found
        left, right = check(self, lhs, rhs, *flags, **more)
        if left is lhs:
            right.handle.data.setflags(write=False)
            numbers[key] = right
        return left, right

    def of_type(self: Any, operand: Any, type: Any) -> Any:
        if operand.type is type:
            return operand
        element = type.scalar
        if not element.is_ptr():
            operand = cast_other(self, operand, element)
        handle, blocks = operand.handle, type.is_block()
        missing = len(type.shape) - handle.data.ndim if blocks and operand.type.is_block() else 0
        if missing:
            data = handle.data.reshape(*[1] * missing, *handle.data.shape)
            handle = interpreter.TensorHandle(data, handle.dtype)
        return tensor(handle, type)

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        shapes = [x.type.shape.values if x.type.is_block() else None for x in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(self, lhs, rhs)

    def cast_other(self: Any, value: Any, type: Any, *rounding: Any) -> Any:
        return value if value.dtype is type.scalar else cast(self, value, type, *rounding)

    semantic.binary_op_type_checking_impl = check_once
    semantic.broadcast_impl_value = broadcast_unequal
    semantic.cast = cast_other


def _shift_bfloat16() -> None:
    """Its 16 bits are the upper ones of float32; the interpreter takes denormal ones for others."""
    builder = interpreter.InterpreterBuilder
    extend = builder.create_fp_ext

    def extend_bfloat16(self: Any, source: Any, type: Any) -> Any:
        if (source.dtype.scalar, type.scalar) != (tl.bfloat16, tl.float32):
            return extend(self, source, type)
        bits = source.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    builder.create_fp_ext = extend_bfloat16


def _compare_to_bits() -> None:
    """Give the result of a comparison its own type; the interpreter gives it the operands'.

    Spread over a block, a scalar result becomes an integer, which Triton 3.9 accepts as no mask.
    """
    builder = interpreter.InterpreterBuilder

    def typed(compare: Callable) -> Callable:
        def compare_to_bits(*args: Any) -> Any:
            return interpreter.TensorHandle(compare(*args).data, tl.int1)

        return compare_to_bits

    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, typed(getattr(builder, name)))
