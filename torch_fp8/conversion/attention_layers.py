"""Selection of the attention modules that save q, k and v in FP8, with reasons for the others."""

from typing import NamedTuple

from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.report import SkippedModule
from torch_fp8.nn.attention_dispatch import (
    EAGER,
    PAGED,
    attention_forward,
    eager_function,
    is_marked,
    mark,
    output_projection,
    registry,
    shares_output,
    unmark,
)
from torch_fp8.nn.class_swap import stock_class
from torch_fp8.nn.layer_filter import matches
from torch_fp8.nn.linear import Float8Layer

UNKNOWN = "not an attention function from transformers' registry, so q, k and v are saved unchanged"


class SavedAttention(NamedTuple):
    """The attention modules of a model.

    Attributes:
        saved: qualified names of the modules that save q, k and v in FP8.
        shared: names from `saved` whose output the next layer keeps in FP8.
        left: all other attention modules, with the reasons; empty for ``save_attention="bf16"``.
    """

    saved: tuple[str, ...]
    shared: tuple[str, ...]
    left: tuple[SkippedModule, ...]


def save_attention(model: nn.Module, config: FP8Config) -> SavedAttention:
    """Make the attention modules of `model` save q, k and v as `config.save_attention` says."""
    saved: list[str] = []
    shared: list[str] = []
    left: list[SkippedModule] = []
    for name, module in model.named_modules():
        reason = _reason(name, module, config)
        if is_marked(module) and (reason is not None or config.save_attention == "bf16"):
            unmark(module)
        if config.save_attention == "bf16" or not _is_attention(module):
            continue
        if reason is None:
            projection = output_projection(module) if config.save_attention == "qkvo" else None
            mark(module, projection)
            saved.append(name)
            if shares_output(module, projection):
                shared.append(name)
        elif not any(_holds(other.name, name) for other in left):
            left.append(SkippedModule(name, reason))
    # Do not report a module that contains supported attention, or is part of it.
    left = [s for s in left if not any(_holds(s.name, n) or _holds(n, s.name) for n in saved)]
    return SavedAttention(tuple(saved), tuple(shared), tuple(left))


def leave_attention(model: nn.Module) -> None:
    """Make all attention modules of `model` save q, k and v unchanged."""
    for module in model.modules():
        if is_marked(module):
            unmark(module)


def _is_attention(module: nn.Module) -> bool:
    if attention_forward(module) is not None:
        return True
    named = "attention" in stock_class(type(module)).__name__.lower()
    return named and any(isinstance(child, Float8Layer) for child in module.modules())


def _reason(name: str, module: nn.Module, config: FP8Config) -> str | None:
    """Return the reason why a module does not save q, k and v in FP8; None: it does."""
    if attention_forward(module) is None:
        return UNKNOWN
    for pattern in config.skip:
        if matches(pattern, name):
            return f"skip={pattern!r}"
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if implementation == EAGER and eager_function(module) is not None:
        return None
    if implementation in registry().valid_keys() and not str(implementation).startswith(PAGED):
        return None
    return f"attn_implementation={implementation!r} computes it; q, k and v are saved unchanged"


def _holds(outer: str, inner: str) -> bool:
    return outer == "" or inner == outer or inner.startswith(f"{outer}.")
