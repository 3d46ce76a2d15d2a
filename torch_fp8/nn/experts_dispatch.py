"""The way from transformers' expert modules to `torch_fp8.nn.experts.Float8Experts`.

transformers asks a global mapping at every call which function computes a module's experts. An
entry of ours stands there in place of ``grouped_mm`` while a converted module exists, and hands on
the modules that are not converted. Names and configurations stay as they are, so that expert
parallelism, which keeps a bound method, finds what it expects. ``generate`` switches to
``batched_mm`` for a while, which multiplies by the weights of single tokens' experts: it runs in
high precision. Functions of transformers get the BF16 halves of weights that are stored in two,
where autocast would cast the whole ones.
"""

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import in_high_precision
from torch_fp8.tensor.split_weight import SplitWeight
from torch_fp8.tensor.weight_half import half

ENTRY = "grouped_mm"
_ENTRIES = (ENTRY, "batched_mm")

_converted: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def functions() -> Any:
    """Return transformers' mapping of expert functions; None where it is not imported."""
    return getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)


class Dispatch:
    """An entry: computes converted modules in FP8, and others as the entry before it did.

    Attributes:
        name: the entry's.
        previous: the entry before.
    """

    def __init__(self, name: str, previous: Any) -> None:
        self.name, self.previous = name, previous

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not hasattr(module, "fp8_experts_forward"):
            return self.previous(module, *args, **kwargs)
        output: Tensor | None = None
        if self.name == ENTRY:
            output = module.fp8_experts_forward(*args, **kwargs)
        if output is None:
            with _halves(module):
                output = self.previous(module, *args, **kwargs)
        return output


@contextlib.contextmanager
def _halves(module: Any) -> Iterator[None]:
    """Show the BF16 halves of split weights under autocast, within; no-op for other weights."""
    weights = {name: module._parameters.get(name) for name in module.fp8_weight_names}
    hidden: list[str] = []
    for name, weight in weights.items():
        if not isinstance(weight, SplitWeight) or in_high_precision():
            continue
        if torch.is_autocast_enabled(weight.device.type):
            # The attribute hides the Parameter of this name, which stays where it is.
            module.__dict__[name] = half(weight)
            hidden.append(name)
    try:
        yield
    finally:
        for name in hidden:
            del module.__dict__[name]


def add(module: nn.Module) -> None:
    """Dispatch the calls of a converted module from now on."""
    registry = functions()
    if registry is None:
        return
    _converted.add(module)
    for name in _ENTRIES:
        if not isinstance(registry[name], Dispatch):
            registry[name] = Dispatch(name, registry[name])


def remove(module: nn.Module) -> None:
    """Leave a module to transformers again; with the last one the entries go."""
    _converted.discard(module)
    registry = functions()
    if registry is None or _converted:
        return
    for name in _ENTRIES:
        if isinstance(registry[name], Dispatch):
            previous = registry[name].previous
            del registry[name]
            if registry[name] is not previous:  # somebody else's entry, not transformers' own
                registry[name] = previous
