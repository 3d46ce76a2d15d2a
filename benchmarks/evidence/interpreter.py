"""Fixes for Triton's interpreter: it runs with any NumPy, and its results have the right types.

It is for separate processes in which ``TRITON_INTERPRET=1`` was set before Triton was imported:
those of the counts of bytes and launches (`benchmarks.evidence.launches`), and of the test of the
Triton GEMM, some of whose instructions the emulator of PTX does not have.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def _fp8_bytes(x: Any, E5M2: Any) -> Any:
    kind = tl.float8e5 if getattr(E5M2, "value", E5M2) else tl.float8e4nv
    return x.to(kind).to(tl.uint8, bitcast=True)


ASSEMBLY: dict[str, Callable] = {
    "fp8_bytes": _fp8_bytes,
    "fast_sigmoid": lambda x: 1.0 / (1.0 + tl.exp(-x)),
    "_approximate_reciprocal": lambda x: 1.0 / x,
}
"""Replacements for the functions of `torch_fp8.kernels` that are inline assembly."""


def mend() -> None:
    """Replace functions of the interpreter for the rest of the process.

    A scalar is an array of shape (1,) there, on which int() fails with NumPy >= 2.4.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy_2(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy_2
    _patch_once()
    _share_types()
    _shift_bfloat16()
    _compare_to_bits()


def _patch_once() -> None:
    """Patch the modules of the functions that kernels call, once for all launches."""
    patch_language = interpreter._patch_lang
    patched: set[int] = set()

    class Kept(interpreter._LangPatchScope):
        def restore(self) -> None:
            pass

    def patch_language_once(function: Callable) -> Any:
        names = function.__globals__
        if id(names) not in patched:
            patched.add(id(names))
            patch_language(function)
            for name, stub in ASSEMBLY.items():
                if isinstance(names.get(name), interpreter.InterpretedFunction):
                    names[name] = stub
        return kept

    kept = Kept()
    interpreter._patch_lang = patch_language_once


def _share_types() -> None:
    """Share one type among blocks of equal shape and element: creating them took half the time."""
    blocks: dict[tuple, core.block_type] = {}
    make_block = core.block_type.__init__

    def block(cls: Any, element: Any, shape: Any) -> Any:
        sizes = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        key = element.name, sizes
        made = blocks.get(key)
        if made is None:
            made = object.__new__(cls)
            make_block(made, element, shape)
            blocks[key] = made
        return made

    core.block_type.__new__ = block
    core.block_type.__init__ = lambda self, element, shape: None
    core.block_type.to_ir = lambda self, builder: self


def _shift_bfloat16() -> None:
    """Shift bfloat16's bits into float32's upper half; the interpreter misreads denormals."""
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

    Spread over a block, a scalar result becomes an integer, which Triton 3.9 refuses as a mask.
    """
    builder = interpreter.InterpreterBuilder

    def typed(compare: Callable) -> Callable:
        def compare_to_bits(*args: Any) -> Any:
            return interpreter.TensorHandle(compare(*args).data, tl.int1)

        return compare_to_bits

    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, typed(getattr(builder, name)))
