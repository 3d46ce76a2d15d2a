"""Tensors that outlive ``torch.inference_mode()``, so that training can use them later."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def outside_inference_mode(function: _F) -> _F:
    """Decorate a function that creates or writes tensors that training uses later.

    Autograd does not save tensors that were created inside ``torch.inference_mode()``, and nothing
    outside may write to them. Inside, the function therefore runs under ``torch.no_grad()`` alone.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **options)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **options)

    return wrapper  # type: ignore[return-value]
