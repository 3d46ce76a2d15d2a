"""Repeated launches without Triton's search for the binary.

At each launch, Triton determines in Python which binary fits the arguments: types, alignment of
pointers, divisibility of integers, compile-time constants and options. A training step repeats the
same few launches with other tensors. `QuickKernel` therefore remembers the binary for each such key
and launches it as ``kernel[grid](*arguments)`` does, but skips the preparation for hooks if none
is registered.

The key is at least as fine as Triton's: an integer counts by value, a tensor by dtype and alignment
(its address modulo 16), a float by its type.

While AOTAutograd traces a launcher, its tensors have no memory, and a launch becomes a node of the
graph instead (`torch_fp8.kernels.traced_launch`).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from torch_fp8.kernels import traced_launch
from torch_fp8.kernels.launch_tape import REPLAYS, recording

_MOST = 4096
"""Launches remembered per kernel, a bound for runs whose token counts never repeat."""


class QuickKernel(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A Triton kernel that remembers its launches; see the module's docstring."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        known: dict[Any, Any] = self.__dict__.setdefault("_launches", {})

        def launch(*args: Any, **options: Any) -> None:
            if args[0].__class__ is FunctionalTensor:
                traced_launch.launch(self, grid, args, options)
                return
            parts: list[Any] = [grid, args[0].get_device(), *options, *options.values()]
            add = parts.append
            for a in args:  # no function call for numbers: a block has a hundred
                kind = a.__class__
                if kind is int or kind is bool:
                    add(a)
                elif kind is Tensor or isinstance(a, Tensor):
                    add(a.dtype)
                    add(a.data_ptr() & 15)
                else:
                    add(float if kind is float else a)
            key = tuple(parts)
            runner = known.get(key) if REPLAYS and not self.pre_run_hooks else None
            if runner is None:
                runner = self._first(key, grid, args, options)
            else:
                run, constants = runner
                run(*args, *constants)
            recorder = recording()
            if recorder is not None:
                recorder.launched(self, args, runner)

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
        known: dict[Any, Any] = self.__dict__["_launches"]
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
        if _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook):
            hooked(*args)
            return
        stream = active.get_current_stream(active.get_current_device())
        run(*grid, stream, function, packed, None, None, None, *args)

    return launch


def _calls(hook: Any) -> Any:
    """Return the functions that a Triton hook calls, if it is a chain; else the hook."""
    return getattr(hook, "calls", hook)


def quick(kernel: Any) -> Any:
    """Make a kernel of ``triton.jit`` remember its launches, and visible in graphs.

    Kernels of Triton's interpreter are returned unchanged. If
    `torch_fp8.kernels.launch_tape.REPLAYS` is False, nothing is remembered.

    Args:
        kernel: kernel whose callers pass compile-time constants and options by name, and a tensor
            on the current device as the first argument.
    """
    if type(kernel) is JITFunction:
        kernel.__class__ = QuickKernel
    return kernel


def start_driver() -> None:
    """Start Triton's driver, which compiles its C module or loads it from Triton's cache."""
    driver.active  # noqa: B018
