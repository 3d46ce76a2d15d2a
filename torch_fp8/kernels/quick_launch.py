"""Repeated launches without Triton's search for the binary.

At each launch, Triton determines in Python which binary fits the arguments: types, alignment of
pointers, divisibility of integers, compile-time constants and options. A training step repeats the
same few launches with other tensors. `QuickKernel` therefore remembers the binary for each such key
and launches it as ``kernel[grid](*arguments)`` does, but skips the preparation for hooks if none
is registered.

The key is at least as fine as Triton's: an integer counts by value, a tensor by dtype and alignment
(its address modulo 16), a float by its type.

While AOTAutograd traces a launcher, its tensors have no memory, and a launch becomes a node of the
graph instead, which Inductor launches without our Python (`add_launch`). To know what a kernel
writes, torch translates it to Triton's IR three times for each launch, which would take half of the
compile time of a transformer block. Here a kernel is translated once: an `Outline` has the source
of its kernel, which Inductor compiles, but torch's analysis sees a body that reads every tensor and
writes those that the kernel writes.
"""

import ast
import re
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import wrap_triton
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from torch_fp8.kernels.launch_tape import REPLAYS, recording

_FUSION = "enable_fp_fusion"
"""An option of a launch that neither `triton.Config` nor Inductor knows."""


class Outline(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A kernel whose parsed body only reads its tensors and writes some of them.

    Its source and its launches are those of the kernel, with two differences. Floats are
    compile-time constants, because Inductor would pass them in double precision, in which the
    kernel would then compute. And it takes FP8 tensors, whose bytes the kernel reads and writes.

    Args:
        kernel: the kernel.
        args: its tensors and numbers by name, without compile-time constants.
        constants: its compile-time constants by name.
        options: options of each launch.
    Attributes:
        writes: names of the tensors that it writes.
    """

    def __init__(self, kernel: JITFunction, args: Any, constants: Any, options: Any) -> None:
        super().__init__(kernel.fn)
        tensors = {name: value for name, value in args.items() if isinstance(value, Tensor)}
        dtypes = {n: torch.uint8 if _is_fp8(x) else x.dtype for n, x in tensors.items()}
        with _disable_current_modes():  # the analysis wants tensors with an address
            real = {name: torch.empty(2, dtype=dtype) for name, dtype in dtypes.items()}
            places = (
                kernel_side_table.add_kernel(kernel),
                kernel_side_table.add_constant_args(constants),
            )
            writes = {*get_mutated_tensors(*places, args | real, {})}
        # torch takes all tensors for written if its analysis fails.
        assert writes != dtypes.keys(), f"torch cannot tell which tensors {kernel.__name__} writes"
        lines = [
            f"tl.store({name}, tl.load({name}))" if name in writes else f"tl.load({name})"
            for name in tensors
        ]
        self.body = ast.parse("\n".join(lines)).body
        head, end, code = kernel.src.partition("):")
        for name in (name for name, x in tensors.items() if _is_fp8(x)):
            end += f"\n    {name} = {name}.to(tl.pointer_type(tl.uint8))"
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
        args = tuple(
            x.view(torch.uint8) if isinstance(x, Tensor) and _is_fp8(x) else x for x in args
        )
        return self.kernel.run(*args, **options, **self.options)


def add_launch(
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
        outline = Outline(kernel, dict(zip(kernel.arg_names, args, strict=False)), constants, only)
        known[key] = triton.autotune([triton.Config({}, **others)], key=[])(outline)
    writes = known[key].fn.writes
    named = zip(kernel.arg_names, args, strict=False)
    inputs = [x if name in writes else _addressed(x) for name, x in named]
    wrap_triton(known[key])[grid](*inputs, **constants)


def _is_fp8(x: Tensor) -> bool:
    return x.dtype.itemsize == 1 and x.dtype.is_floating_point


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


_NUMBERS = frozenset({int, bool, float, type(None)})
"""The types of a launch's arguments other than tensors."""
_MOST = 4096
"""Launches remembered per kernel, a bound for runs whose token counts never repeat."""


class QuickKernel(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A Triton kernel that remembers its launches; see the module's docstring."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        known, end = self.launches, self._end  # of the arguments that choose the binary

        def launch(*args: Any, **options: Any) -> None:
            options.setdefault(_FUSION, True)  # releases of Triton have different defaults
            if args[0].__class__ is FunctionalTensor:
                add_launch(self, grid, args, options)
                return
            parts: list[Any] = [  # no function call for numbers: a block has a hundred
                (float if a.__class__ is float else a)
                if a.__class__ in _NUMBERS
                else (a.dtype, a.data_ptr() & 15)
                for a in args[:end]
            ]
            key = (grid, args[0].get_device(), *options, *options.values(), *parts)
            runner = known.get(key) if REPLAYS and not self.pre_run_hooks else None
            if runner is None:
                runner = self._first(key, grid, args, options)
            else:
                run, constants = runner
                run(*args, *constants)
            recorder = recording()
            if recorder is not None:
                recorder.launched(self, args, runner if end is None else None)

        return launch

    def _first(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """Launch through Triton; remember and return its binary's runner and constants."""
        kernel = self.run(*args, grid=grid, warmup=False, **options)
        if not REPLAYS or self.pre_run_hooks or not hasattr(kernel, "__getitem__"):
            return None  # a hook sees the launch, or has replaced it
        known = self.launches
        if len(known) >= _MOST:
            known.clear()
        constants = tuple(options[name] for name in self.arg_names[len(args) :])
        known[key] = runner = _runner(kernel, (*grid, 1, 1)[:3]), constants
        return runner


def _runner(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return a function that launches a binary.

    Args:
        kernel: compiled kernel of Triton 3.6 or 3.7 that has been launched before.
        grid: numbers of programs along the three axes.
    """
    hooked = kernel[grid]
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    runtime, active = knobs.runtime, driver.active

    def launch(*args: Any) -> None:
        try:
            has_hooks = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        except AttributeError:  # a function in place of the chain of hooks
            has_hooks = True
        if has_hooks:
            hooked(*args)
            return
        stream = active.get_current_stream(args[0].device.index)
        run(*grid, stream, function, packed, None, None, None, *args)

    return launch


def quick(kernel: Any, changing: int = 0) -> Any:
    """Make a kernel of ``triton.jit`` remember its launches, and visible in graphs.

    Kernels of Triton's interpreter are returned unchanged. If
    `torch_fp8.kernels.launch_tape.REPLAYS` is False, nothing is remembered.

    Args:
        kernel: kernel whose callers pass compile-time constants and options by name, and a tensor
            on the current device as the first argument.
        changing: number of arguments, the last ones, that differ from launch to launch: integers of
            32 bits with a sign, on which the kernel is not specialized. No tape replays such a
            launch.
    """
    if type(kernel) is JITFunction:
        kernel.__class__ = QuickKernel
        kernel.__dict__["_end"] = -changing or None
        kernel.__dict__["launches"] = {}
    return kernel


def start_driver() -> None:
    """Start Triton's driver, which compiles its C module or loads it from Triton's cache."""
    driver.active  # noqa: B018
