"""Operators that run their CUDA implementations on CPU tensors, within an emulation."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.emulator.place import on_card, state
from torch_fp8.ops import registry

__all__ = ["card_module", "card_tensors", "on_card"]


@contextlib.contextmanager
def card_tensors(modes: int) -> Iterator[None]:
    """Let `on_card` decide within where tensors are.

    Args:
        modes: number of the emulation's own modes of torch's dispatcher.
    """
    depth, base = registry._len_torch_dispatch_stack, torch._C.TensorBase

    def other_modes() -> int:
        return depth() - modes

    is_cuda = property(lambda x: state.on_card or base.is_cuda.__get__(x))
    is_cpu = property(lambda x: not state.on_card and base.is_cpu.__get__(x))
    with contextlib.ExitStack() as stack:
        for owner, name, stub in (
            (torch.Tensor, "is_cuda", is_cuda),
            (torch.Tensor, "is_cpu", is_cpu),
            (registry, "_len_torch_dispatch_stack", other_modes),
        ):
            stack.enter_context(mock.patch.object(owner, name, stub, create=True))
        registry.emulates_casts.cache_clear()
        stack.callback(registry.emulates_casts.cache_clear)
        yield


def card_module(module: ModuleType) -> Any:
    """Return a module's functions, each of which runs `on_card`."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with on_card():
                return function(*args, **options)

        return call

    functions = {k: wrapped(v) for k, v in vars(module).items() if type(v) is type(card_module)}
    return SimpleNamespace(**functions)
