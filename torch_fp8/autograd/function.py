"""What our autograd functions share: results that may be written to, and what they refuse.

They are neither differentiated twice nor go through transforms of torch.func. torch's own errors
name neither the module nor a way out, and where the gradient that comes in needs no gradient
itself, as that of ``y.sum()``, its ``once_differentiable`` returns what looks like a constant: a
penalty on gradients would then be silently left out of those of the weights.
"""

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import _get_proxies

_unsafe_view: Any = torch.ops.aten._unsafe_view.default
_LEAVE = "leave the module as it is with FP8Config(skip=({name!r},)), or torch_fp8.revert the model"


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``backward(ctx, *grads)`` that raises, by name, where its results are differentiated.

    Args:
        backward: of a function that has kept the qualified name of its module as ``ctx.name``.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        message = (
            f"the backward of '{ctx.name}' runs in FP8 and cannot be differentiated, as a penalty "
            f"on gradients would; {_LEAVE.format(name=ctx.name)}"
        )
        raises = torch._C._functions.DelayedError(message.encode(), len(results))
        return raises(*(None if r is None else r.detach().requires_grad_() for r in results))

    return wrapper


def reshaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """A function's result in another shape, and no view: autograd refuses to have these written to.

    Args:
        result: that nobody else holds.
        shape: with as many elements.
    """
    # Eager code calls the operator itself: its wrapper in Python is the host's time.
    call = _unsafe_view if torch.compiler.is_compiling() else _unsafe_view._op
    reshaped: Tensor = call(result, shape)
    return reshaped


def as_text(value: Any) -> str:
    """How something is computed, without tensors, as one constant on which torch.compile guards.

    What Dynamo leaves as one call of its graph (``torch.compiler.allow_in_graph``) takes tensors
    and constants: tracing it takes a tenth of the time that its Python would.
    """
    return pickle.dumps(value, 0).decode("latin1")


@functools.cache
def of_text(text: str) -> Any:
    """What `as_text` was given."""
    return pickle.loads(text.encode("latin1"))


def only_shape_matters(x: Tensor) -> bool:
    """Return whether a call of Dynamo's graph is made to learn the shape of its result alone.

    AOTAutograd, which traces the operators within, makes it under modes of its own. What stands in
    for the result is `shape_of_result`: to trace a layer takes a tenth less time so.
    """
    if type(x) is not FakeTensor:
        return False
    modes = torch._C._TorchDispatchModeKey
    return not any(map(torch._C._get_dispatch_mode, (modes.PROXY, modes.FUNCTIONAL)))


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
    """Have a compiled backward take tensors as they are then, whoever has written them since.

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
    return "" if torch.compiler.is_compiling() else module.fp8_name


def refuse_transforms(name: str) -> None:
    """Raise RuntimeError under torch.func's transforms.

    Args:
        name: of the module.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"'{name}' runs in FP8 and does not go through transforms of torch.func (vmap, grad, "
            f"vjp, jvp); use torch.autograd, or {_LEAVE.format(name=name)}"
        )
