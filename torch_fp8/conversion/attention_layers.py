"""Attention modules that save q, k and v in FP8: their choice, and the hook into transformers.

At every call, transformers looks up the function that computes attention in a global mapping. While
a model has modules that save q, k and v in FP8, an entry of ours replaces each function under the
same name, because transformers also makes masks by that name. In training calls of a marked module
the entry rounds q, k and v (`torch_fp8.nn.saved_attention`) and then calls the original function.
It passes all other calls on unchanged.

Graphs of torch.compile have no saved-tensor hooks, so attention is unchanged there.
"""

import inspect
import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_fp8.autograd.current_pass import in_high_precision
from torch_fp8.config import FP8Config
from torch_fp8.conversion.report import SkippedModule
from torch_fp8.nn.class_swap import own_child, stock_class
from torch_fp8.nn.layer_filter import matches
from torch_fp8.nn.linear import Float8Layer, is_paused
from torch_fp8.nn.saved_attention import SavedOperands, can_round
from torch_fp8.tensor.quantizer import output_dtype

UNKNOWN = "not an attention function from transformers' registry, so q, k and v are saved unchanged"
EAGER = "eager"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_MARK = "fp8_save_attention"
PAGED = "paged|"
_NO_SHIFT = {"tanh", "sinks", "sink", "sigmoid", "relu", "cat"}
"""Names in the code of functions that apply more than a softmax to the products of q and k."""

_marked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


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


def registry() -> Any:
    """Return transformers' mapping of attention functions; None: it is not imported."""
    return getattr(sys.modules.get("transformers.modeling_utils"), _REGISTRY, None)


def attention_forward(module: nn.Module) -> Any:
    """Return a module's forward if it uses transformers' mapping; None: it does not."""
    functions = registry()
    for cls in type(module).__mro__ if functions is not None else ():
        forward: Any = vars(cls).get("forward")
        if forward is None:
            continue
        forward = inspect.unwrap(forward)
        code = getattr(forward, "__code__", None)
        if code is not None and _REGISTRY in code.co_names:
            return forward if forward.__globals__.get(_REGISTRY) is functions else None
    return None


def eager_function(module: nn.Module) -> Any:
    """Return the eager attention function in the file of a module's class; None: there is none."""
    forward = attention_forward(module)
    for name in () if forward is None else forward.__code__.co_names:
        if name.endswith("eager_attention_forward"):
            return forward.__globals__.get(name)
    return None


def output_projection(module: nn.Module) -> str | None:
    """Return the name of the FP8 layer that projects attention's output; None: there is none."""
    forward = attention_forward(module)
    names = () if forward is None else forward.__code__.co_names
    behind = names[names.index(_REGISTRY) + 1 :] if _REGISTRY in names else ()
    layers = [name for name in behind if isinstance(own_child(module, name), Float8Layer)]
    return layers[-1] if layers else None


def shares_output(module: nn.Module, projection: str | None) -> bool:
    """Return whether the output projection saves attention's output in FP8, for its wgrad.

    Args:
        module: attention module.
        projection: name of its output projection; None: share nothing.
    """
    layer = None if projection is None else own_child(module, projection)
    if not isinstance(layer, Float8Layer) or not layer.weight.requires_grad:
        return False
    return layer.fp8.recipe.wgrad is not None


def is_marked(module: Any) -> bool:
    """Return whether a module saves q, k and v in FP8."""
    return _MARK in module.__dict__


class _Dispatch:
    """An entry in transformers' mapping of attention functions.

    Attributes:
        name: name of the entry.
        previous: original function; None for `EAGER`, where each model has its own function.
        functions: eager functions by the class of a module.
    """

    def __init__(self, name: str, previous: Any) -> None:
        self.name, self.previous = name, previous
        self.functions: dict[type, Any] = {}

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        function = self.previous or self.functions.get(type(module))
        if function is None:
            function = self.functions[type(module)] = eager_function(module)
        if function is None:
            raise RuntimeError(
                f"{type(module).__name__} computes attention with its own unsupported function, "
                "while save_attention is on for another model in this process; use "
                "save_attention='bf16', or another attn_implementation"
            )
        mask = args[0] if args else kwargs.get("attention_mask")
        if not (_rounds(module) and self._takes(query, mask) and can_round((query, key, value))):
            return function(module, query, key, value, *args, **kwargs)
        operands = SavedOperands(
            query,
            key,
            value,
            centred=_is_shift_invariant(module, function, kwargs),
            contiguous=self.name == EAGER,
            output=shares_output(module, module.__dict__[_MARK]),
        )
        query, key, value = operands.tensors
        groups = getattr(module, "num_key_value_groups", 1)
        with torch.autograd.graph.saved_tensors_hooks(operands.pack, operands.unpack):
            # Repeat heads before functions that would do it, so that the hooks know what they save.
            if groups > 1 and (self.name == EAGER or (self.name == "sdpa" and mask is not None)):
                key, value = operands.repeated(1, groups), operands.repeated(2, groups)
                module = _Ungrouped(module)
            results = function(module, query, key, value, *args, **kwargs)
        operands.close(results[0] if isinstance(results, tuple) else results)
        return results

    def _takes(self, query: Any, mask: Any) -> bool:
        """Return whether the function saves exactly the tensors that it gets.

        Flash attention drops tokens that a mask hides, and accepts half precision only.
        """
        return "flash" not in self.name or (mask is None and output_dtype(query) != torch.float32)


class _Ungrouped:
    """A proxy of a module for attention functions, with as many heads of keys as of queries."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _rounds(module: Any) -> bool:
    """Return whether this call of a module belongs to training in FP8."""
    if torch.compiler.is_compiling() or not is_marked(module) or not module.training:
        return False
    if not torch.is_grad_enabled() or in_high_precision():
        return False
    return not any(is_paused(child) for child in module.children())


def _is_shift_invariant(module: Any, function: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether adding a constant to all products of a query leaves the result the same."""
    others = ("softcap", "s_aux")
    if any(kwargs.get(name) is not None for name in others) or hasattr(module, "sinks"):
        return False
    file = str(getattr(function, "__module__", ""))
    if file.startswith("transformers.integrations."):
        return True
    code: Any = getattr(function, "__code__", None)
    if code is None or not file.startswith("transformers."):
        return False
    return not _NO_SHIFT.intersection(code.co_names)


def mark(module: nn.Module, projection: str | None = None) -> None:
    """Make a module save q, k and v in FP8 from now on.

    Args:
        module: attention module.
        projection: name of the output projection that shares the saved output; None: share nothing.
    """
    vars(module)[_MARK] = projection
    _marked.add(module)
    functions, config = registry(), getattr(module, "config", None)
    is_eager = getattr(config, "_attn_implementation", None) == EAGER
    for name in [*([EAGER] if is_eager else []), *functions.valid_keys()]:
        if not name.startswith(PAGED) and not isinstance(functions.get(name), _Dispatch):
            functions[name] = _Dispatch(name, functions.get(name))
    if is_eager:  # look it up now, so that torch.compile does not trace the search
        functions[EAGER].functions[type(module)] = eager_function(module)


def unmark(module: nn.Module) -> None:
    """Undo `mark`; the last module also removes our entries from the mapping."""
    vars(module).pop(_MARK, None)
    _marked.discard(module)
    functions = registry()
    if functions is None or _marked:
        return
    for name in list(functions.valid_keys()):
        entry = functions[name]
        if isinstance(entry, _Dispatch):
            del functions[name]
            if entry.previous is not None and functions.get(name) is not entry.previous:
                functions[name] = entry.previous  # another library's entry, not transformers' own
