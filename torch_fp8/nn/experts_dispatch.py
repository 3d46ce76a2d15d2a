"""The hook that connects transformers' expert modules to `torch_fp8.nn.experts.Float8Experts`.

At every call, transformers looks up the function that computes a module's experts in a global
mapping. While a converted module exists, an entry of ours replaces ``grouped_mm`` there; it passes
modules that are not converted on to the original function. Names and configurations do not change,
so that expert parallelism, which keeps a bound method, still works. ``generate`` temporarily
switches to ``batched_mm``, which multiplies by the weights of each token's experts. That runs in
high precision, unless it would have to merge adapters or dequantize frozen weights for each token.
"""

import sys
import weakref
from typing import Any

from torch import Tensor, nn

from torch_fp8.nn.expert_adapters import whole_weights

ENTRY = "grouped_mm"
_ENTRIES = (ENTRY, "batched_mm")

_converted: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def functions() -> Any:
    """Return transformers' mapping of expert functions, or None if it is not imported."""
    return getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)


class Dispatch:
    """An entry that computes converted modules in FP8, and passes others to the original entry.

    Attributes:
        name: name of the entry.
        previous: original entry.
    """

    def __init__(self, name: str, previous: Any) -> None:
        self.name, self.previous = name, previous

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not hasattr(module, "fp8_experts_forward"):
            return self.previous(module, *args, **kwargs)
        output: Tensor | None = None
        if self.name == ENTRY or module.fp8_factors or module.frozen_weights:
            output = module.fp8_experts_forward(*args, **kwargs)
        if output is None:
            with whole_weights(module):
                output = self.previous(module, *args, **kwargs)
        return output


def add(module: nn.Module) -> None:
    """Dispatch the calls of a converted module from now on; add our entries if they are missing."""
    registry = functions()
    if registry is None:
        return
    _converted.add(module)
    for name in _ENTRIES:
        if not isinstance(registry[name], Dispatch):
            registry[name] = Dispatch(name, registry[name])


def remove(module: nn.Module) -> None:
    """Undo `add`; the last module also removes our entries from the mapping."""
    _converted.discard(module)
    registry = functions()
    if registry is None or _converted:
        return
    for name in _ENTRIES:
        if isinstance(registry[name], Dispatch):
            previous = registry[name].previous
            del registry[name]
            if registry[name] is not previous:  # another library's entry
                registry[name] = previous
