"""Which graphs of torch.compile compute losses without logits, and how logits leave them.

A graph cannot return what it has not computed, and returned logits cost more than a fused loss
saves (`torch_fp8.nn.graph_logits`). Two kinds of graphs compute losses without logits:

* those that return no logits. Only their host can know (`return_losses`): Lightning's Trainer
  compiles ``training_step``;
* those of a compiled module whose wrapper is known (`defer_logits`). The model then returns hidden
  states in place of its logits, and a hook of the wrapper makes uncomputed logits of them.

If a graph of the model breaks, its parts are other graphs, and have plain logits (`is_graph_of`).

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
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.nn.graph_logits import GraphLogits
from torch_fp8.tensor.base import map_tensors


class Deferred:
    """Logits that leave a graph: what `LazyLogits` need, without a tensor of all classes."""

    # Dynamo keeps the arguments as long as the object: they may not refer to the logits.
    def __init__(
        self, layer: Any, hidden: Tensor, autocast: dict[str, Any], steps: tuple[Any, ...]
    ) -> None:
        self.layer, self.hidden, self.autocast, self.steps = layer, hidden, autocast, steps

    def logits(self) -> Tensor:
        """Return uncomputed logits outside of graphs, and plain ones in a graph around this one."""
        logits: Tensor = self.layer.logits_of(self.hidden, self.autocast)
        for (func, args, options), grad_mode in self.steps:
            with torch.set_grad_enabled(grad_mode):
                logits = func(logits, *args, **options)
        return logits


def return_losses(model: nn.Module, step: Any) -> None:
    """Let graphs of a function that returns no logits compute losses without logits.

    Args:
        model: a converted model.
        step: the function that is compiled, or a method of this name, which calls the model;
            anything else changes nothing.
    """
    code = getattr(step, "__code__", None)
    for _, head in _heads(model):
        head.step = None if code is None else (code.co_filename, code.co_name)


def defer_logits(compiled: nn.Module) -> None:
    """Let a compiled model compute losses without logits, and return its logits uncomputed.

    Args:
        compiled: a module that torch.compile returned. Other modules are left unchanged.
    """
    model = without_compiler(compiled)
    heads = [head for _, head in _heads(compiled) if compiled not in head.compiled]
    if model is compiled or not heads:
        return
    if isinstance(model, DistributedDataParallel):  # its forward is no graph
        model = model.module
    before, function = vars(model).get("forward"), getattr(model.forward, "__func__", None)
    if function is None or model.forward.__self__ is not model:
        return  # some function in place of the method, which a copy of the model would share

    # Only graphs of this wrapper have such logits: nothing else turns them into tensors.
    def begin(module: Any, args: Any) -> None:
        for head in heads:  # a hook of the model would see what its graph returns
            head.is_deferred = not model._forward_hooks

    def end(module: Any, args: Any, output: Any) -> Any:
        for head in heads:
            head.is_deferred = False
        return _mapped(output, _undeferred)

    # A hook would be a graph of its own.
    model.forward = MethodType(_deferring(function), model)
    hooks = [
        compiled.register_forward_pre_hook(begin),
        compiled.register_forward_hook(end, always_call=True),
    ]
    for head in heads:
        head.compiled[compiled] = functools.partial(_restore, model, before, hooks)


def _restore(model: Any, forward: Any, hooks: list[Any]) -> None:
    """Undo `defer_logits`, unless others have replaced the forward since."""
    for hook in hooks:
        hook.remove()
    wrapper = vars(model).get("forward")
    if getattr(wrapper, "__module__", None) == __name__:
        del model.forward
        if forward is not None:
            model.forward = forward


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        if "loss_head" in vars(module):
            yield module, module.loss_head


@torch.compiler.assume_constant_result
def is_graph_of(file: str, name: str) -> bool:
    """Return whether a trace is that of a function, or of its rest after a graph break.

    If what the function calls breaks, this is traced by itself, without its caller on the stack.
    """
    stack = TracingContext.extract_stack()
    return any(frame.filename == file and name in frame.name for frame in stack)


def _deferring(forward: Any) -> Any:
    @functools.wraps(forward)
    def deferring(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        return _mapped(output, _deferred) if torch.compiler.is_compiling() else output

    deferring.__module__ = __name__
    return deferring


DEFERRING = __file__, "deferring"
"""File and name of the forward of models whose graphs return hidden states."""


def _deferred(x: Any) -> Any:
    if isinstance(x, GraphLogits) and not x.recorded.call.is_read:
        call: Any = x.recorded.call
        return Deferred(call.layer, call.hidden, call.autocast, x.recorded.steps)
    return x


def _undeferred(x: Any) -> Any:
    return x.logits() if isinstance(x, Deferred) else x


def _mapped(output: Any, function: Any) -> Any:
    """Return an output with `function` applied to it, or to the items of a container.

    A container is another one, because Dynamo keeps the old items of one that changes.
    """
    if isinstance(output, dict) and dataclasses.is_dataclass(output):  # transformers' ModelOutput
        items = {name: function(value) for name, value in output.items()}
        in_graph = torch.compiler.is_compiling()
        if not in_graph and all(items[name] is value for name, value in output.items()):
            return output
        return type(output)(**items)
    return map_tensors(output, function)
