"""Launches that were made before, made again without what Triton asks each time.

Triton finds out with each launch which binary its arguments take: types, alignment of pointers,
divisibility of integers, compile-time constants and options, all of it in Python. A step makes
the same few launches again and again, with other tensors. So the binary is kept beside what told
it, and launched as ``kernel[grid](*arguments)`` does, but for what that makes for hooks where
nobody has registered one.

What tells the binary is taken at least as finely as Triton takes it: an integer by its value, a
tensor by its dtype and by whether its address is a multiple of 16, a float by being one.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from torch_fp8.kernels.launch_tape import REPLAYS, recording

_MOST = 4096
"""Launches that are kept of a kernel: numbers of tokens that never come again shall not add up."""


class QuickKernel(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A Triton kernel whose launches are remembered; see the module."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        known: dict[Any, Any] = self.__dict__.setdefault("_launches", {})

        def launch(*args: Any, **how: Any) -> None:
            parts: list[Any] = [grid, args[0].get_device(), *how, *how.values()]
            add = parts.append
            for a in args:  # without a call for a number: there are a hundred in a block
                kind = a.__class__
                if kind is int or kind is bool:
                    add(a)
                elif kind is Tensor or isinstance(a, Tensor):
                    add(a.dtype)
                    add(a.data_ptr() & 15)
                else:
                    add(float if kind is float else a)
            key = tuple(parts)
            found = None if self.pre_run_hooks else known.get(key)
            if found is None:
                found = self._first(key, grid, args, how)
            else:
                run, constants = found
                run(*args, *constants)
            recorder = recording()
            if recorder is not None:
                recorder.launched(self, args, found)

        return launch

    def _first(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        how: dict[str, Any],
    ) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """Launch as Triton does, and keep what it has found, which is returned."""
        kernel = self.run(*args, grid=grid, warmup=False, **how)
        if self.pre_run_hooks or not hasattr(kernel, "__getitem__"):
            return None  # somebody's hook sees the launch, or has taken it
        known: dict[Any, Any] = self.__dict__["_launches"]
        if len(known) >= _MOST:
            known.clear()
        constants = tuple(how[name] for name in self.arg_names[len(args) :])
        known[key] = found = _runner(kernel, (*grid, 1, 1)[:3]), constants
        return found


def _runner(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return what launches a binary.

    Args:
        kernel: a kernel of Triton 3.6 or 3.7, which has been launched.
        grid: the numbers of its programs.
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
    """Return what a hook of Triton's, a chain of functions mostly, calls."""
    return getattr(hook, "calls", hook)


def quick(kernel: Any) -> Any:
    """Make a kernel of ``triton.jit`` remember its launches; the interpreter's stays as it is.

    So does each one where `torch_fp8.kernels.launch_tape.REPLAYS` is False.

    Args:
        kernel: launched with its compile-time constants and options by name, and with a tensor
            on the current device as its first argument.
    """
    if REPLAYS and type(kernel) is JITFunction:
        kernel.__class__ = QuickKernel
    return kernel
