"""What our autograd functions share: results that may be written to, and what they refuse.

With ``create_graph=True`` a backward either computes by operators that torch differentiates, or
raises at once. torch's ``once_differentiable`` raises later, and in silence not at all: its results
lead to no input, so that ``autograd.grad`` of them never asks. A penalty on gradients would be left
out of those of the weights.
"""

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import _get_proxies, get_proxy_mode

from torch_fp8.autograd.current_pass import is_traced

_unsafe_view: Any = torch.ops.aten._unsafe_view.default
Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_by(second: Backward) -> Callable[[Backward], Backward]:
    """Decorate a ``backward(ctx, *grads)`` whose results `second` computes where they are
    differentiated.

    Args:
        second: the same function by operators that torch differentiates; or it raises.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            if torch.compiler.is_compiling():
                with torch.no_grad():
                    return backward(ctx, *grads)
            if torch.is_grad_enabled() or forward_ad._current_level >= 0:
                return second(ctx, *grads)
            return backward(ctx, *grads)

        return wrapper

    return decorate


def refuse_derivatives(ctx: Any, *grads: Tensor) -> Any:
    """Raise RuntimeError, for the gradients of a module cannot be differentiated.

    Args:
        ctx: context of a function that has kept the qualified name of its module as ``ctx.name``.
    """
    name = ctx.name
    raise RuntimeError(
        f"the backward of '{name}' runs in FP8 and cannot be differentiated, as create_graph=True "
        "asks for (penalties on gradients, Hessian products, second-order MAML); run the forward "
        "and the backward of this pass within torch_fp8.high_precision(), or leave the module "
        f"unconverted with FP8Config(skip=({name!r},))"
    )


once_differentiable = differentiable_by(refuse_derivatives)


def is_asked_for(ctx: Any, i: int) -> bool:
    """Return whether the backward that runs wants the gradient of the tensor `i` of a function.

    ``needs_input_grad`` knows what takes a gradient; ``autograd.grad`` asks for few of them.
    """
    node = ctx.next_functions[i][0]
    return node is not None and (is_returned(ctx, i) or torch._C._will_engine_execute_node(node))


def is_returned(ctx: Any, i: int) -> bool:
    """Return whether the backward that runs is ``autograd.grad`` of a leaf, the tensor `i`."""
    node = ctx.next_functions[i][0]
    if node is None:
        return False
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # so torch says it
        return not is_traced()
    return False


def reshaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape an autograd function's result, and make no view: users may not write to such views.

    Args:
        result: tensor of any shape that nobody else holds.
        shape: sizes of the returned tensor, with as many elements.
    """
    # Eager code calls the operator itself: its wrapper in Python is the host's time.
    call = _unsafe_view if torch.compiler.is_compiling() else _unsafe_view._op
    reshaped: Tensor = call(result, shape)
    return reshaped


def as_text(value: Any) -> str:
    """Serialize options without tensors to a string, a constant that torch.compile guards on.

    What Dynamo leaves as one call of its graph (``torch.compiler.allow_in_graph``) takes tensors
    and constants, and is traced without its Python.
    """
    return pickle.dumps(value, 0).decode("latin1")


@functools.cache
def of_text(text: str) -> Any:
    """Return the options that `as_text` has serialized; the same object for the same text."""
    return pickle.loads(text.encode("latin1"))


def only_shape_matters(x: Tensor) -> bool:
    """Return whether a call of Dynamo's graph is made to learn the shape of its result alone.

    AOTAutograd, which traces the operators within, makes it under modes of its own. What stands in
    for the result is `shape_of_result`, which is traced in less time.
    """
    return type(x) is FakeTensor and get_proxy_mode() is None


class _ShapeOfResult(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: Sequence[int], dtype: torch.dtype, x: Tensor, *others: Tensor | None
    ) -> Tensor:
        return x.new_empty(shape, dtype=dtype)


def shape_of_result(shape: Sequence[int], dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
    """Return a fake result, which needs a gradient where an operand does: `only_shape_matters`."""
    result: Tensor = _ShapeOfResult.apply(shape, dtype, *operands)
    return result


def written_in_backward(tensors: Sequence[Tensor]) -> None:
    """Let a compiled backward read tensors that are written after forward, as they are then.

    It keeps them beside ``ctx.save_for_backward``; torch tells these apart where Dynamo itself
    traces an autograd function (``AutogradFunctionApply``), but not where AOTAutograd does.
    """
    for tensor in tensors:
        for proxy in _get_proxies(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def name_of(module: Any) -> str:
    """The qualified name of a converted module; "" while it is compiled.

    A graph serves all blocks of a model, whatever their names: past 8 of them torch.compile leaves
    a function eager. torch 2.11 guards on a name as soon as it is handed to a function.
    """
    return "" if torch.compiler.is_compiling() else module.fp8.name
