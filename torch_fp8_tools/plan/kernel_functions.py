"""Functions that fused kernels can replace, followed once.

Where such a kernel (`fla`, `mamba_ssm`) is not installed, transformers loops over tokens or chunks
in Python: thousands of operators for each layer. These functions see tensors alone, so the bytes of
one call are those of every call with equal layouts, in all layers and at all levels.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from torch_fp8_tools.plan.followed_step import FollowedStep, Moment
from torch_fp8_tools.plan.known_results import Layout, key_of, layout_of, new_layouts

FEWEST_OPERATORS = 500
"""The minimum number of operators of a function that is followed once."""
_HUB = "transformers.integrations.hub_kernels"


@dataclass
class _Bytes:
    """The bytes of a call.

    Attributes:
        forward, backward: at the peak, the bytes beyond those at the start; and the number of
            operators.
        outputs: the layout of each output, whether backward needs it, and whether it has a
            gradient, or None for an output that is None.
        is_tuple: whether the function returns a tuple.
        held: the bytes that backward needs besides inputs and outputs.
        inputs: the places of the inputs that backward needs.
        gradients: the layout of each input's gradient, or None if it has none.
    """

    forward: tuple[Moment, int]
    backward: tuple[Moment, int]
    outputs: list[tuple[Layout, bool, bool] | None]
    is_tuple: bool
    held: int
    inputs: list[int]
    gradients: list[Layout | None]


_known: dict[Any, _Bytes | None] = {}
"""The bytes by function and arguments, for all steps, or None to run each call."""


@contextlib.contextmanager
def followed_once(step: FollowedStep, model: nn.Module) -> Iterator[None]:
    """Replace the functions that the modules of `model` call in a step.

    Each runs once for each layout of arguments; later calls, also in other steps, only count bytes.
    """
    with contextlib.ExitStack() as stack:
        for module in {sys.modules[type(each).__module__] for each in model.modules()}:
            for name, value in [*vars(module).items()]:
                is_decorated = hasattr(value, "__wrapped__") and hasattr(value, "__globals__")
                if is_decorated and value.__globals__["__name__"] == _HUB:
                    stack.enter_context(patch.object(module, name, partial(_once, step, value)))
        yield


def _once(step: FollowedStep, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    values = [*args, *kwargs.values()]
    places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    inputs = [values[i] for i in places]

    def call(tensors: list[Any]) -> Any:
        new = dict(zip(places, tensors, strict=True))
        given = [new.get(i, value) for i, value in enumerate(values)]
        return function(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    needs = tuple(tensor.requires_grad for tensor in inputs)
    key = key_of((function, torch.is_grad_enabled(), needs, *values, *kwargs))
    if key is not None and key not in _known:
        _known[key] = _follow(step, call, inputs)
    known = _known.get(key)
    if known is None:
        return function(*args, **kwargs)
    tensors = iter(_SameBytes.apply(step, known, *inputs))
    outputs = [None if each is None else next(tensors) for each in known.outputs]
    return tuple(outputs) if known.is_tuple else outputs[0]


def _follow(step: FollowedStep, call: Callable[[list[Any]], Any], like: list[Any]) -> _Bytes | None:
    """Run a call forward and backward on new tensors, or None if it cannot stand for others.

    The peak of backward counts all inputs, as if the caller held them.
    """
    calls, begun, moments = step.calls, step.begun, step.moments
    inputs = [step.new(t, layout_of(t)).requires_grad_(t.requires_grad) for t in like]
    needing = [tensor for tensor in inputs if tensor.requires_grad]
    # Not the hooks of activation checkpointing, which drop what backward needs.
    with torch.autograd.graph.saved_tensors_hooks(step.save, lambda tensor: tensor):
        start = step.restart()
        returned = call([t.view_as(t) for t in inputs])  # autocast caches casts of leaves
        forward = step.beyond(start), step.calls - calls
        is_tuple = isinstance(returned, tuple)
        results = [*returned] if is_tuple else [returned]
        tensors = [tensor for tensor in results if tensor is not None]
        outputs = [
            None if t is None else (layout_of(t), step.saves(t), t.requires_grad) for t in results
        ]
        held = step.total - start[0] - sum(t.untyped_storage().nbytes() for t in tensors)
        saved = [i for i, tensor in enumerate(inputs) if step.saves(tensor)]
        is_plain = new_layouts((*inputs, *tensors), inputs[0], ()) is not None
        grads: dict[int, Any] = {}
        backward: tuple[Moment, int] = (0, 0), 0
        if roots := [tensor for tensor in tensors if tensor.requires_grad]:
            before = step.begun = step.calls
            root = _Root.apply(step, *roots)
            del returned, results, tensors, roots
            with torch.autocast("cpu", enabled=False):
                of_inputs = torch.autograd.grad(root, needing, allow_unused=True)
            backward = step.beyond(step.begin_of_root), step.calls - before
            pairs = zip(needing, of_inputs, strict=True)
            grads = {id(t): grad for t, grad in pairs if grad is not None}
            is_plain &= new_layouts((*inputs, *grads.values()), inputs[0], ()) is not None
    step.calls, step.begun, step.moments = calls, begun, moments
    if not is_plain or forward[1] + backward[1] < FEWEST_OPERATORS:
        return None
    gradients = [layout_of(grads[id(t)]) if id(t) in grads else None for t in inputs]
    return _Bytes(forward, backward, outputs, is_tuple, held, saved, gradients)


class _Root(torch.autograd.Function):
    """Ends the forward of a call, and allocates the gradients of its outputs."""

    @staticmethod
    def forward(ctx: Any, step: FollowedStep, *outputs: Any) -> Any:
        ctx.step, ctx.layouts = step, [layout_of(tensor) for tensor in outputs]
        return step.new(outputs[0], (torch.Size(()), (), torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradients = [ctx.step.new(gradient, layout) for layout in ctx.layouts]
        ctx.step.begin_of_root = ctx.step.restart()
        return None, *gradients


class _SameBytes(torch.autograd.Function):
    """Allocates and frees what a call does, without its operators."""

    @staticmethod
    def forward(ctx: Any, step: FollowedStep, known: _Bytes, *inputs: Any) -> Any:
        ctx.step, ctx.known = step, known
        step.add_call(*known.forward)
        tensors, saved = [], [inputs[i] for i in known.inputs]
        for layout, is_saved, needs in filter(None, known.outputs):
            tensors.append(step.new(inputs[0], layout))
            if is_saved:
                saved.append(tensors[-1])
            if not needs:
                ctx.mark_non_differentiable(tensors[-1])
        # Saved as autograd saves tensors, so that activation checkpointing drops it.
        held = step.new(inputs[0], (torch.Size((known.held,)), (1,), torch.uint8))
        ctx.save_for_backward(held, *saved)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        step, known = ctx.step, ctx.known
        held = ctx.saved_tensors[0]
        step.add_call(*known.backward)
        number = len(step.moments)  # torch frees inputs and gradients of outputs at the call's end
        gradients = [each and step.new(held, each) for each in known.gradients]
        step.drop(number)
        return None, None, *gradients
