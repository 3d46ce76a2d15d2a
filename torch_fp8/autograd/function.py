"""Helpers for our autograd functions: writable results, second derivatives, torch.compile, and
tensors that outlive ``torch.inference_mode()``.

With ``create_graph=True``, a backward either uses operators that torch can differentiate, or raises
at once. torch's ``once_differentiable`` raises later, or never: its results have no path to an
input, so ``autograd.grad`` on them silently skips it, and a gradient penalty would be missing from
the gradients of the weights.
"""

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.multiprocessing.reductions import StorageWeakRef

from torch_fp8.autograd.current_pass import is_traced

_unsafe_view: Any = torch.ops.aten._unsafe_view.default
Backward = Callable[..., tuple[Tensor | None, ...]]


class Function(torch.autograd.Function):
    """An autograd function without torch's Python wrapper around ``apply``, to save host time.

    The wrapper serves the transforms of ``torch.func``, in which converted modules run in high
    precision.
    """

    apply: Any = next(
        vars(c)["apply"] for c in torch.autograd.Function.__mro__[1:] if "apply" in vars(c)
    )


def differentiable_by(second: Backward) -> Callable[[Backward], Backward]:
    """Decorate ``backward(ctx, *grads)`` to call `second` if its results will be differentiated.

    Args:
        second: the same function with operators that torch can differentiate, or one that raises.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            if not (torch.is_grad_enabled() or forward_ad._current_level >= 0):
                return backward(ctx, *grads)
            if torch.compiler.is_compiling():
                with torch.no_grad():
                    return backward(ctx, *grads)
            return second(ctx, *grads)

        return wrapper

    return decorate


def refuse_derivatives(ctx: Any, *grads: Tensor) -> Any:
    """Raise RuntimeError, because the gradients of this module cannot be differentiated.

    Args:
        ctx: context of a function with the qualified name of its module in ``ctx.name``.
        grads: gradients, which are ignored.
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
    """Return whether the running backward needs the gradient of argument `i` of a function.

    ``needs_input_grad`` only tells what requires a gradient; ``autograd.grad`` may need fewer.
    """
    node = ctx.next_functions[i][0]
    return node is not None and (is_returned(ctx, i) or will_run(node))


will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the running backward runs this node, which is not a leaf that it returns."""


def is_returned(ctx: Any, i: int) -> bool:
    """Return whether the running backward is ``autograd.grad`` with argument `i`, a leaf.

    It is False in a graph of torch.compile, which is traced before any backward runs.
    """
    if is_traced():  # Dynamo's context has no next functions
        return False
    node = ctx.next_functions[i][0]
    if node is None:
        return False
    try:
        will_run(node)
    except RuntimeError:  # torch raises it in exactly this case
        return True
    return False


def reshaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape an autograd function's result without a view, because users cannot write to views.

    Autograd forbids in-place writes to views that a custom function returns.

    Args:
        result: tensor without other references.
        shape: shape of the returned tensor, with the same number of elements.
    """
    # Eager code calls the operator without its Python wrapper, to save host time.
    call = _unsafe_view if torch.compiler.is_dynamo_compiling() else _unsafe_view._op
    return call(result, shape)


def as_text(value: Any) -> str:
    """Serialize options without tensors to a string, a constant on which torch.compile can guard.

    A function that Dynamo leaves as a single node of its graph (``torch.compiler.allow_in_graph``)
    takes tensors and constants only.
    """
    return pickle.dumps(value, 0).decode("latin1")


@functools.cache
def of_text(text: str) -> Any:
    """Return the options from `as_text`; the same object for the same text."""
    return pickle.loads(text.encode("latin1"))


def only_shape_matters(x: Tensor) -> bool:
    """Return whether Dynamo calls a node of its graph only for the shape of the result.

    `shape_of_result` then replaces the computation, because it traces faster. AOTAutograd, which
    traces the operators inside, calls the node under its own modes.
    """
    return type(x) is FakeTensor and get_proxy_mode() is None


class _ShapeOfResult(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: Sequence[int], dtype: torch.dtype, x: Tensor, *others: Tensor | None
    ) -> Tensor:
        return x.new_empty(shape, dtype=dtype)


def shape_of_result(shape: Sequence[int], dtype: torch.dtype, *operands: Tensor | None) -> Tensor:
    """Return a fake result that requires a gradient if an operand does; see
    `only_shape_matters`.
    """
    return _ShapeOfResult.apply(shape, dtype, *operands)


def written_in_backward(tensors: Sequence[Tensor]) -> None:
    """Let a compiled backward use tensors that are written between forward and backward.

    The function stores them outside of ``ctx.save_for_backward``. torch makes that distinction if
    Dynamo traces an autograd function (``AutogradFunctionApply``), but not if AOTAutograd does.

    Args:
        tensors: tensors whose versions a compiled backward must not check.
    """
    mode = get_proxy_mode()
    for tensor in tensors:
        if mode is not None and isinstance(tensor, FunctionalTensor):
            traced: Any = get_proxy_slot(tensor.from_functional(), mode.tracer)
            traced.proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def addends_in_graph(x: Tensor) -> list[Tensor]:
    """Return the two floating tensors of x's shape whose sum x is in the graph that is traced.

    Returns:
        The tensors, the first with the dtype of x; or none if x is anything else.
    """
    mode = get_proxy_mode()
    if mode is None or not isinstance(x, FunctionalTensor):
        return []
    traced: Any = get_proxy_slot(x.from_functional(), mode.tracer, None)
    node = traced and traced.proxy.node
    if not node or node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return []
    values = [n.meta.get("val") if isinstance(n, Node) else None for n in node.args]
    if any(v is None or v.shape != x.shape or not v.is_floating_point() for v in values):
        return []
    for value, addend in zip(values, node.args, strict=True):  # nobody need hold the tensors
        track_tensor_tree(value, Proxy(addend, mode.tracer), constant=None, tracer=mode.tracer)
    addends = [FunctionalTensor.to_functional(value) for value in values]
    return sorted(addends, key=lambda addend: addend.dtype != x.dtype)


def read_in_graph(x: Tensor, same: Tensor) -> None:
    """Let operators on x that are traced from now on read a tensor with the same values instead."""
    mode: Any = get_proxy_mode()
    old, new = (t.from_functional() for t in (x, same) if isinstance(t, FunctionalTensor))
    set_proxy_slot(old, mode.tracer, get_proxy_slot(new, mode.tracer))


def is_saved(x: Tensor) -> bool:
    """Return whether a backward will read x, or a view of it: whether torch holds either."""
    count, alone = (
        torch._C._storage_Use_Count(StorageWeakRef(t.untyped_storage()).cdata)
        for t in (x, torch.empty(0, dtype=x.dtype, device=x.device))
    )
    return count > alone or x._use_count() > 1


def name_of(module: Any) -> str:
    """Return the qualified name of a converted module; "" while torch.compile traces it.

    All blocks of a model share a graph if no name is in it. Otherwise torch.compile would recompile
    for each name and fall back to eager after 8. torch 2.11 guards on any name that is passed on.
    """
    return "" if torch.compiler.is_compiling() else module.fp8.name


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
