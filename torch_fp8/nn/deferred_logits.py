"""Which graphs of torch.compile compute losses without logits, and how logits leave them.

A graph cannot return what it has not computed, and returned logits cost more than a fused loss
saves (`torch_fp8.nn.graph_logits`). Two kinds of graphs compute losses without logits:

* those that return no logits. Only their host can know that (`return_losses`): Lightning's Trainer
  compiles ``training_step``;
* those of exactly the forward of one module (`defer_logits`). They return tensors without memory in
  place of logits, which become uncomputed logits outside.

If a graph of the model breaks, its parts are other graphs, and have plain logits.

Legend: H hidden features, V classes.
"""

import dataclasses
import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.nn.graph_logits import GraphLogits
from torch_fp8.nn.lazy_logits import LazyLogits
from torch_fp8.tensor.base import map_tensors


class _Origin:
    """Attribute whose assignment turns a tensor without memory into uncomputed logits.

    For tensors that leave a graph, Dynamo repeats the assignment outside. The value consists of the
    output layer, hidden states (..., H), the state of autocast, and the steps after the layer.
    """

    @torch._disable_dynamo  # no graph contains this assignment
    def __set__(self, x: "Departed", value: tuple[Any, ...]) -> None:
        layer, hidden, autocast, steps = value
        logits: Any = layer.logits_of(hidden, autocast)
        for (func, args, options), grad_mode in steps:
            with torch.set_grad_enabled(grad_mode):
                logits = func(logits, *args, **options)
        x.__class__ = LazyLogits
        logits.recorded.move_to(x)


class Departed(Tensor):
    """Logits (..., V, ...) that leave a graph: a shape without memory and without gradient.

    AOTAutograd passes such a subclass out of a graph as its inner tensor, which is empty.
    """

    origin = _Origin()
    inner: Tensor

    @staticmethod
    def of(inner: Tensor, sizes: Any, strides: Any) -> "Departed":
        self: Departed = torch.Tensor._make_wrapper_subclass(
            Departed, sizes, strides=strides, dtype=inner.dtype, device=inner.device
        )
        self.inner = inner
        return self

    def __repr__(self, **options: Any) -> str:
        return f"Departed({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, sizes: Any, strides: Any) -> Tensor:
        return Departed.of(inner["inner"], sizes, strides)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            raise AssertionError(f"a graph computes {func} of logits that leave it")
        x: Departed = args[0]
        return Departed.of(func(x.inner), x.size(), x.stride())


@torch.compiler.allow_in_graph
def _departed(hidden: Tensor, dtype: torch.dtype, sizes: Any, strides: Any) -> Tensor:
    with torch.no_grad():
        return Departed.of(hidden.detach().new_empty(0, dtype=dtype), sizes, strides)


def return_losses(model: nn.Module, step: Any) -> None:
    """Let graphs of a function that returns no logits compute losses without logits.

    Args:
        model: a converted model.
        step: compiled function or method that calls the model; anything else changes nothing.
    """
    code = getattr(step, "__code__", None)
    for _, head in _heads(model):
        head.step = None if code is None else (code.co_filename, code.co_name)


def fuses(step: tuple[str, str] | None) -> bool:
    """Return whether the graph of this trace computes losses without logits.

    Args:
        step: file and name of a function whose graphs return no logits, including those of the
            code after a graph break, or None if no such function is known.
    """
    return _frames_from(*DEFERRING) > 0 or (step is not None and _is_within(*step))


def defer_logits(model: nn.Module) -> None:
    """Let graphs of each module that contains an output layer return its logits uncomputed.

    Args:
        model: a converted model. If something has replaced a module's forward since the last call,
            the new one is wrapped. Modules that run in FP8 themselves are left unchanged.
    """
    for module in model.modules():
        contains = any(layer is not module for layer, _ in _heads(module))
        forward: Any = module.forward
        own = getattr(forward, "__self__", None) is module and not _is_deferring(module)
        is_model = without_compiler(module) is module and not isinstance(module, RunsFP8)
        if contains and own and is_model:
            module.forward = MethodType(_deferring(module, forward.__func__), module)


def restore_forwards(model: nn.Module) -> None:
    """Undo `defer_logits`, unless others have replaced the forward since."""
    for module in model.modules():
        if _is_deferring(module):
            forward: Any = module.forward
            del module.forward
            if forward.__wrapped__ is not getattr(module.forward, "__func__", None):
                module.forward = MethodType(forward.__wrapped__, module)


def _is_deferring(module: nn.Module) -> bool:
    code = getattr(getattr(vars(module).get("forward"), "__func__", None), "__code__", None)
    return code is not None and (code.co_filename, code.co_name) == DEFERRING


def _deferring(module: nn.Module, forward: Any) -> Any:
    """Return a forward whose graphs return uncomputed logits."""
    is_own = "forward" in vars(module)

    @functools.wraps(forward)
    def deferring(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function: Any = forward if is_own else type(self).forward  # programs may replace the latter
        output = function(self, *args, **kwargs)
        leaves = torch.compiler.is_compiling() and _frames_from(*DEFERRING) == 1
        return _leaving(output) if leaves else output

    return deferring


DEFERRING = __file__, "deferring"
"""File and name of the forward of models whose graphs return uncomputed logits."""


def _heads(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    for module in model.modules():
        if "loss_head" in vars(module):
            yield module, module.loss_head


@torch.compiler.assume_constant_result
def _frames_from(file: str, name: str) -> int:
    """Return the number of functions on the stack of a trace if it began with this one, or 0.

    What comes after a graph break is traced by itself, without its caller, and has another name.
    """
    stack = TracingContext.extract_stack()
    return len(stack) if (stack[0].filename, stack[0].name) == (file, name) else 0


@torch.compiler.assume_constant_result
def _is_within(file: str, name: str) -> bool:
    """Return whether a function, or its rest after a graph break, is on the stack of a trace."""
    stack = TracingContext.extract_stack()
    return any(frame.filename == file and name in frame.name for frame in stack)


def _leaving(output: Any) -> Any:
    """Return a graph's output, with logits replaced by ones that leave the graph uncomputed.

    Containers are copied, because Dynamo keeps the old items of one that changes.
    """
    if isinstance(output, dict) and dataclasses.is_dataclass(output):  # transformers' ModelOutput
        return type(output)(**{name: _departing(value) for name, value in output.items()})
    return map_tensors(output, _departing)


def _departing(x: Any) -> Any:
    if not isinstance(x, GraphLogits) or x.recorded.call.is_read:
        return x
    call: Any = x.recorded.call
    departed: Any = _departed(call.hidden, x.dtype, x.size(), x.stride())
    departed.origin = call.layer, call.hidden, call.autocast, x.recorded.steps
    return departed
