"""Launches in graphs of torch.compile: each is a node that Inductor launches without our Python.

While AOTAutograd traces a launcher, `torch_fp8.kernels.quick_launch` calls `launch` for each of its
kernels, which adds ``torch.library.wrap_triton`` to the graph.

To know what a kernel writes, torch translates it to Triton's IR three times for each launch, which
would take half of the compile time of a transformer block. Here a kernel is translated once: an
`Outline` has the source of its kernel, which Inductor compiles, but torch's analysis sees a body
that reads every tensor and writes those that the kernel writes.
"""

import ast
import re
from typing import Any

import torch
import triton
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import wrap_triton
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.jit import JITFunction

_FUSION = "enable_fp_fusion"
"""An option of a launch that neither `triton.Config` nor Inductor knows."""


class Outline(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A kernel whose parsed body only reads its tensors and writes some of them.

    Its source and its launches are those of the kernel, but floats are compile-time constants:
    Inductor would pass them in double precision, in which the kernel would then compute.

    Args:
        kernel: the kernel.
        args: its tensors and numbers by name, without compile-time constants.
        writes: names of the tensors that it writes.
        options: options of each launch.
    """

    def __init__(
        self,
        kernel: JITFunction,
        args: dict[str, Any],
        writes: set[str],
        options: dict[str, Any],
    ) -> None:
        super().__init__(kernel.fn)
        lines = [
            f"tl.store({name}, tl.load({name}))" if name in writes else f"tl.load({name})"
            for name, value in args.items()
            if isinstance(value, Tensor)
        ]
        self.body = ast.parse("\n".join(lines)).body
        head, end, code = kernel.src.partition("):")
        for parameter in self.params:
            if isinstance(args.get(parameter.name), float):
                parameter.is_constexpr = True
                head = re.sub(rf"\b{parameter.name},", f"{parameter.name}: tl.constexpr,", head)
        self.text = head + end + code
        self.kernel, self.writes, self.options = kernel, writes, options

    @property
    def src(self) -> str:
        """The source that Inductor compiles."""
        return self.text

    def parse(self) -> ast.Module:
        """Return the syntax tree that Triton translates for torch's analysis."""
        tree = ast.parse(self.text)
        tree.body[0].body = self.body  # type: ignore[attr-defined]
        return tree

    def run(self, *args: Any, **options: Any) -> Any:
        """Launch the kernel itself, in graphs that run without Inductor."""
        return self.kernel.run(*args, **options, **self.options)


def launch(
    kernel: JITFunction, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Add a launch to the graph that is being traced.

    Args:
        kernel: the kernel.
        grid: numbers of programs.
        args: tensors and numbers, without compile-time constants.
        options: compile-time constants and options by name.
    """
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    known: dict[Any, Any] = kernel.__dict__.setdefault("_outlines", {})
    key = tuple(options.items())
    if key not in known:
        others = {name: value for name, value in options.items() if name not in constants}
        only = {_FUSION: others.pop(_FUSION)} if _FUSION in others else {}
        outline = _outline(kernel, dict(zip(kernel.arg_names, args, strict=False)), constants, only)
        known[key] = triton.autotune([triton.Config({}, **others)], key=[])(outline)
    writes = known[key].fn.writes
    named = zip(kernel.arg_names, args, strict=False)
    inputs = [x if name in writes else _addressed(x) for name, x in named]
    wrap_triton(known[key])[grid](*inputs, **constants)


def _addressed(x: Any) -> Any:
    """Return a tensor in a form that Inductor computes once, not once per use as an argument.

    If x is another shape of a tensor, Inductor computes that one, for its other readers, too.
    """
    if not isinstance(x, Tensor) or not _is_dense(x):
        return x
    base: Any = x._base
    same = base is not None and base.dtype == x.dtype and _is_dense(base)
    same = same and statically_known_true(base.numel() == x.numel())
    return (base if same else x).as_strided(x.shape, x.stride())


def _is_dense(x: Tensor) -> bool:
    """Return whether x is known to be contiguous from its storage's start; adds no guard."""
    expected: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return False
        expected = size * expected
    return statically_known_true(x.storage_offset() == 0)


def _outline(
    kernel: JITFunction,
    args: dict[str, Any],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> Outline:
    dtypes = {name: value.dtype for name, value in args.items() if isinstance(value, Tensor)}
    with _disable_current_modes():  # the analysis wants tensors with an address
        real = {name: torch.empty(2, dtype=dtype) for name, dtype in dtypes.items()}
        places = (
            kernel_side_table.add_kernel(kernel),
            kernel_side_table.add_constant_args(constants),
        )
        writes = {*get_mutated_tensors(*places, args | real, {})}
    # torch takes all tensors for written if its analysis fails.
    assert writes != dtypes.keys(), f"torch cannot tell which tensors {kernel.__name__} writes"
    return Outline(kernel, args, writes, options)
