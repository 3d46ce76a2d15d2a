"""Operators that run their CUDA implementations on CPU tensors, within an emulation."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from torch_fp8.ops import registry

_state = SimpleNamespace(on_card=False, modes=0)


@contextlib.contextmanager
def card_tensors(modes: int) -> Iterator[None]:
    """Let `on_card` decide within where tensors are.

    Args:
        modes: number of the emulation's own modes of torch's dispatcher.
    """
    depth = registry._len_torch_dispatch_stack

    def other_modes() -> int:
        return depth() - modes

    place = property(lambda x: _state.on_card or torch._C.TensorBase.is_cuda.__get__(x))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", place, create=True))
        seen = mock.patch.object(registry, "_len_torch_dispatch_stack", other_modes)
        stack.enter_context(seen)
        registry.emulates_casts.cache_clear()
        stack.callback(registry.emulates_casts.cache_clear)
        yield


@contextlib.contextmanager
def on_card() -> Iterator[None]:
    """Take all tensors within for tensors on CUDA, by their `is_cuda`."""
    before, _state.on_card = _state.on_card, True
    try:
        yield
    finally:
        _state.on_card = before


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
