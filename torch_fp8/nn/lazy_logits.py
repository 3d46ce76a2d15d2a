"""`LazyLogits`: the output of an output layer that is computed only if something reads it.

A cross entropy needs no logits in memory: `torch_fp8.nn.loss_head` computes them in chunks. So a
converted output layer (`torch_fp8.nn.output_layer`) returns logits that remember how to compute
them. Operations that programs put between the layer and its loss (casts, shifts, views, factors, a
softcap) are recorded: each returns further such logits, with the hidden states that belong to its
rows. ``F.cross_entropy`` then calls the fused loss.

Any other operation gets the plain tensor of the unconverted layer, with its gradient. It is
computed with the weight, the grad mode and the autocast state of the layer's call, and from then on
all logits of this call are plain. If the weight or the hidden states were written in between,
reading raises an error; before an optimizer's step, the weight is copied instead.

Code that does not go through ``__torch_function__``, such as an autograd function that a program
calls, sees a tensor with a node of its own in the graph. Its backward computes the same gradients.

Legend: H hidden features, V classes.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.autograd.function import once_differentiable
from torch_fp8.nn.head_call import HeadCall
from torch_fp8.tensor.base import map_tensors

_aten: Any = torch.ops.aten


def empty_meta(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory, outside all modes, because these may count it."""
    if torch.compiler.is_compiling():
        return torch.empty(sizes, dtype=dtype, device="meta")
    with _disable_current_modes():
        return torch.empty(sizes, dtype=dtype, device="meta")


class Recorded:
    """Logits recorded as an operation on other logits, and computed at most once.

    Args:
        call: forward of the output layer.
        hidden: hidden states of the rows, with H in place of V.
        shape_of: empty meta tensor with the shape, strides and dtype of the logits.
        class_dim: dimension of V.
        parent: logits to which `func` was applied, or None if these are the layer's output.
        step: function, further positional arguments, and keyword arguments.
        scales: factors of the logits so far, and None for each tanh.
        is_detached: whether an operation has cut the graph.
    """

    plain: Tensor | None = None

    def __init__(
        self,
        call: HeadCall,
        hidden: Tensor,
        shape_of: Tensor,
        class_dim: int,
        parent: "LazyLogits | None" = None,
        step: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None,
        scales: tuple[float | None, ...] = (),
        is_detached: bool = False,
    ) -> None:
        self.call, self.hidden, self.shape_of, self.class_dim = call, hidden, shape_of, class_dim
        self.parent, self.scales, self.is_detached = parent, scales, is_detached
        self.grad_mode = torch.is_grad_enabled()
        before = () if parent is None else parent.recorded.steps
        self.steps: tuple[Any, ...] = before if step is None else (*before, (step, self.grad_mode))

    @property
    def requires_grad(self) -> bool:
        return self.call.requires_grad and self.grad_mode and not self.is_detached

    def dense(self) -> Tensor:
        """Return the plain logits."""
        if self.plain is None:
            if self.parent is None:
                self.plain = self.call.dense()
            else:
                self.plain = self._apply(to_plain(self.parent), *self.steps[-1])
                self.parent = None  # frees its memory, unless something else holds it
        return self.plain

    @staticmethod
    def _apply(logits: Tensor, step: Any, grad_mode: bool) -> Tensor:
        func, args, options = step
        with torch.set_grad_enabled(grad_mode):
            result: Tensor = func(logits, *args, **options)
        return result

    def move_to(self, logits: "LazyLogits") -> None:
        """Make a tensor without origin stand for these logits, with their node in the graph."""
        logits.recorded, call = self, self.call
        if self.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                _Handle.apply(self, call.hidden, call.weight, call.bias, logits)

    def replay(self, *inputs: Any) -> Tensor:
        """Return the logits for other hidden states, weight and bias of the layer's call."""
        logits = self.call.multiply(*inputs)
        for step in self.steps:
            logits = self._apply(logits, *step)
        return logits


class LazyLogits(Tensor):
    """Logits (..., V, ...) that are not computed yet; see the module docstring.

    Attributes:
        recorded: origin of the values.
        through: plain tensor behind the node that another autograd function gave to these logits.
    """

    recorded: Recorded
    through: Tensor | None = None

    @staticmethod
    def of(recorded: Recorded) -> "LazyLogits":
        """Return a tensor with a node in the graph if the logits require a gradient."""
        call = recorded.call
        call.logits.add(recorded)
        if not recorded.requires_grad:
            return LazyLogits.bare(recorded)
        return _Handle.apply(recorded, call.hidden, call.weight, call.bias, None)

    @staticmethod
    def bare(recorded: Recorded) -> "LazyLogits":
        like = recorded.shape_of
        self: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=recorded.call.hidden.device,
        )
        self.recorded = recorded
        return self

    def __repr__(self, **options: Any) -> str:
        return repr(to_plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return to_plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = result = to_plain(self).__deepcopy__(memo)
        return result

    @classmethod
    @torch._disable_dynamo  # a graph has no logits without values
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in OF_SHAPE:
            return _on_handle(func, args, kwargs)
        x = args[0] if args else None
        if isinstance(x, LazyLogits) and not x.recorded.call.is_read:
            if func in _OF_NODE:
                return _on_handle(func, args, kwargs)
            step = STEPS.get(func) if args else None
            result = NotImplemented if step is None else step(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
            x.recorded.call.reader = getattr(func, "__name__", "")
        if func is torch.autograd.grad:
            map_tensors((args, kwargs), _refuse_fused)
        if _writes(func, kwargs):
            map_tensors((args, kwargs), _compute_all)
        return func(*map_tensors(args, to_plain), **map_tensors(kwargs, to_plain))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:
            return LazyLogits.bare(args[0].recorded)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*map_tensors(args, _values), **map_tensors(kwargs or {}, _values))


def _on_handle(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_ALIASES = (_aten.detach.default, _aten.alias.default)
_PROPERTIES: tuple[str, ...] = ("shape", "dtype", "device", "layout", "ndim", "is_nested")
_PROPERTIES += ("requires_grad", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized")
_METHODS: tuple[str, ...] = ("size", "stride", "dim", "ndimension", "numel", "nelement", "__len__")
_METHODS += ("element_size", "get_device", "is_floating_point", "is_complex", "is_contiguous")
_METHODS += ("is_inference", "__hash__")
OF_SHAPE = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
OF_SHAPE |= {getattr(Tensor, name) for name in _METHODS}
OF_SHAPE |= {torch.is_floating_point, torch.is_complex, torch.numel}
"""Functions that read no element."""
_OF_NODE = {
    getattr(Tensor, n).__get__ for n in ("grad", "grad_fn", "is_leaf", "output_nr", "_base")
}
"""Functions that read the node of logits, before they are plain."""
STEPS: "dict[Any, Callable[..., Any]]" = {}
"""Our versions of functions of torch for `LazyLogits`, from `torch_fp8.nn.logit_steps`; each
returns NotImplemented if it needs the plain logits.
"""


for _name, _method in vars(Tensor).items():
    # Dynamo treats instances as plain objects, and fails in torch's methods in Python.
    if isinstance(_method, FunctionType) and _name not in vars(LazyLogits):
        setattr(LazyLogits, _name, torch._disable_dynamo(_method))


def to_plain(x: Any) -> Any:
    """Return plain logits with their gradient; other values unchanged."""
    if not isinstance(x, LazyLogits):
        return x
    logits = x.recorded.dense()
    if not has_other_node(x):
        return logits
    if x.through is None:
        x.through = _Through.apply(x, logits.detach())
    return x.through


def has_other_node(x: LazyLogits) -> bool:
    """Return whether another autograd function returned these logits, as DDP's does."""
    with torch._C.DisableTorchFunctionSubclass():
        node = x.grad_fn
    return node is not None and type(node).__name__ != "_HandleBackward"


def _values(x: Any) -> Any:
    return x.recorded.dense().detach() if isinstance(x, LazyLogits) else x


def _compute_all(x: Any) -> Any:
    """Compute all logits of a call, because an operation writes to some of them."""
    if isinstance(x, LazyLogits):
        for recorded in list(x.recorded.call.logits):
            recorded.dense()
    return x


def _refuse_fused(x: Any) -> Any:
    if isinstance(x, LazyLogits) and x.recorded.call.is_fused:
        raise RuntimeError(
            f"a loss of the logits of '{x.recorded.call.name}' was computed without the logits, so "
            "it has no gradient with respect to them; train with FP8Config(loss_head='off')"
        )
    return x


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_IN_PLACE = (*(f"__i{name}__" for name in (*_OPERATORS, "lshift", "rshift")), "__setitem__")
WRITERS = frozenset(
    getattr(Tensor, name)
    for name in dir(Tensor)
    if name in _IN_PLACE or (name.endswith("_") and not name.startswith("_"))
)
"""Methods of tensors that write to them."""


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    written = func in WRITERS or (name.endswith("_") and not name.endswith("__"))
    return written or name == "__set__" or "out" in kwargs or bool(kwargs.get("inplace"))


class _Handle(torch.autograd.Function):
    """Node of `LazyLogits` for gradients that reach them without ``__torch_function__``."""

    @staticmethod
    def forward(
        ctx: Any,
        recorded: Recorded,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        logits: LazyLogits | None,
    ) -> LazyLogits:
        ctx.set_materialize_grads(False)
        ctx.recorded, ctx.name = recorded, recorded.call.name
        if logits is None:
            return LazyLogits.bare(recorded)
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        call, needs = ctx.recorded.call, ctx.needs_input_grad[1:4]
        if grad is None:  # from `Touched`
            return None, None, None, None, None
        with call.present():
            inputs = [
                None if t is None else t.detach().requires_grad_(needed)
                for t, needed in zip((call.hidden, call.weight, call.bias), needs, strict=True)
            ]
            with torch.enable_grad():
                logits = ctx.recorded.replay(*inputs)
            wanted = [t for t in inputs if t is not None and t.requires_grad]
            grads = iter(torch.autograd.grad(logits, wanted, to_plain(grad)))
        return None, *(next(grads) if needed else None for needed in needs), None


class _Through(torch.autograd.Function):
    """Return the values of logits as a plain tensor whose gradient goes to the logits' node."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Touched(torch.autograd.Function):
    """Map a loss and logits to the loss, so that its backward runs the node of the logits, too."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: LazyLogits) -> Tensor:
        ctx.set_materialize_grads(False)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
