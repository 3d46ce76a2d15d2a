"""Where tensors are said to be, while operators run their CUDA implementations on CPU tensors."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

state = SimpleNamespace(on_card=False)


@contextlib.contextmanager
def on_card(on: bool = True) -> Iterator[None]:
    """Take all tensors within for tensors on CUDA, by `is_cuda` and `is_cpu`, or as they are."""
    before, state.on_card = state.on_card, on
    try:
        yield
    finally:
        state.on_card = before


@contextlib.contextmanager
def either_implementation() -> Iterator[None]:
    """Register operators within so that their CUDA implementations run `on_card`.

    Before `torch_fp8` is imported.
    """
    register = torch.library.Library.impl
    on_cpu: dict[str, Callable[..., Any]] = {}

    def registering(
        self: Any, name: str, function: Any, dispatch_key: str = "", **options: Any
    ) -> None:
        if dispatch_key == "CPU":
            on_cpu[name] = function
        elif dispatch_key == "CUDA" and name in on_cpu:
            register(self, name, _either(on_cpu[name], function), "CPU", **options)
        else:
            register(self, name, function, dispatch_key, **options)

    with mock.patch.object(torch.library.Library, "impl", registering):
        yield


def _either(on_cpu: Callable[..., Any], on_cuda: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return (on_cuda if state.on_card else on_cpu)(*args)

    return call
