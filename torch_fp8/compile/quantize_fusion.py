"""Fusion of casts into producers (norms, gated products) in graphs of torch.compile.

In such a graph norms, gated products and their gradients are plain tensors (`LazyQuantizedTensor`
is for eager code), and linear layers cast them by ``torch_fp8::quantize_2d``. When that operator is
traced, it looks up which node made its input. If that is a producer, with only views in between, an
operator of the producer that emits FP8 replaces the cast. If nothing else reads the 16-bit tensor,
it is eliminated as dead code. This works for forward and backward, and the bytes do not change.

Casts that eager code does not fuse are not fused here either. The amax that delayed scaling
records, ``torch_fp8::amax``, also comes from the producer if it has one.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.traceback import get_current_meta

# These imports define the operators.
import torch_fp8.ops.quantize
import torch_fp8.ops.rms_norm
import torch_fp8.ops.swiglu
import torch_fp8.ops.swiglu_backward  # noqa: F401
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.quantization.scaling import tensor_amax

_aten: Any = torch.ops.aten
_ops: Any = torch.ops.torch_fp8
VIEWS = (
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.detach.default,
)


def _is_made_by(cast: CastOptions, made: CastOptions) -> bool:
    """Return whether an existing cast `made` covers all that `cast` needs."""
    same = cast._replace(rowwise=made.rowwise, columnwise=made.columnwise) == made
    return same and made.rowwise >= cast.rowwise and made.columnwise >= cast.columnwise


class Call(NamedTuple):
    """An operator call that replaces a cast.

    Attributes:
        func, args: operator and its arguments, with nodes for tensors.
        first: index of the result that corresponds to the first of the cast's four results.
    """

    func: Any
    args: tuple[Any, ...]
    first: int = 0


class TracedGraph:
    """The graph that a tracing mode has built so far."""

    def __init__(self, mode: ProxyTorchDispatchMode) -> None:
        self.tracer = mode.tracer

    def node_of(self, x: Tensor) -> Node | None:
        """Return the node of a tensor in the graph; None: it has none."""
        slot = get_proxy_slot(x, self.tracer, None)
        return None if slot is None else slot.proxy.node

    def source_of(self, x: Tensor) -> Node | None:
        """Return the node that computed x, through any views, if it has the
        shape of x; else None.
        """
        node = self.node_of(x)
        while node is not None and node.target in VIEWS:
            node = _as_node(node.args[0])
        shape = getattr(None if node is None else node.meta.get("val"), "shape", ())
        same = len(shape) == x.ndim and all(
            statically_known_true(a == b) for a, b in zip(shape, x.shape, strict=True)
        )
        return node if same else None

    def calls(self, func: Any, *args: Any) -> Iterator[Node]:
        """Yield the calls ``func(*args, ...)`` in the graph, or in the current
        checkpoint region.
        """
        region = get_current_meta().get("ac_graph_id")
        for user in args[0].users:
            alike = user.target is func and user.args[: len(args)] == args
            if alike and user.meta.get("ac_graph_id") == region:
                yield user

    def results(self, call: Call) -> Any:
        """Return the results of a call; add it to the graph if it is missing."""
        node = next(self.calls(call.func, *call.args), None)
        if node is None:
            args = tuple(Proxy(a, self.tracer) if isinstance(a, Node) else a for a in call.args)
            proxy = self.tracer.create_proxy("call_function", call.func, args, {})
        else:
            proxy = Proxy(node, self.tracer)
        with disable_proxy_modes_tracing():
            values = call.func(*(a.meta["val"] if isinstance(a, Node) else a for a in call.args))
        return track_tensor_tree(values, proxy, constant=None, tracer=self.tracer)

    def node_of_call(self, call: Call) -> Node:
        """Return the node of a call; add it to the graph if it is missing."""
        self.results(call)
        return next(self.calls(call.func, *call.args))

    def tensor_of(self, node: Node) -> Tensor:
        """Return a tensor for a node."""
        with disable_proxy_modes_tracing():
            value = node.meta["val"].clone()
        proxy = Proxy(node, self.tracer)
        tensor: Tensor = track_tensor_tree(value, proxy, constant=None, tracer=self.tracer)
        return tensor


class _Producer(NamedTuple):
    """The nodes that replace casts and amaxes of an operator's result.

    Attributes:
        cast: operator that casts the result.
        fused: function that returns the call for a cast; None: no fusion.
        amax: function that returns the node of the result's amax; None: there is none.
    """

    cast: Any
    fused: Callable[[TracedGraph, Node, CastOptions], Call | None]
    amax: Callable[[TracedGraph, Node], Node | None]


def _trace_cast(
    mode: ProxyTorchDispatchMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Trace ``torch_fp8::quantize_2d``."""
    x, cast, call, scale = args[0], CastOptions(*args[1:]), None, None
    if isinstance(x, FakeTensor) and cast.amax is None:
        graph = TracedGraph(mode)
        source, scale = (
            graph.source_of(x),
            None if cast.scale is None else graph.node_of(cast.scale),
        )
        if source is not None and (cast.scale is None) == (scale is None):
            scale = _first_scale(graph, source, cast, scale)
            call = _fused(graph, source, cast._replace(scale=scale))
    if call is None:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    results = graph.results(call)[call.first : call.first + 4]
    return results if scale is None else (results[0], graph.tensor_of(scale), *results[2:])


def _first_scale(
    graph: TracedGraph, source: Node, cast: CastOptions, scale: Node | None
) -> Node | None:
    """Return the scale of the first cast of the result of `source`.

    As in eager code, all readers use it.

    Args:
        scale: node of the scale in `cast`; None: there is none.
    """
    producer = _PRODUCERS.get(source.target)
    if scale is None or producer is None:
        return scale
    for node in graph.calls(producer.cast, *source.args):
        of = CastOptions(*node.args[len(source.args) :][:7])
        if of.scale is not None and of.dtype == cast.dtype:
            first: Any = of.scale
            return _as_node(first)
    return scale


def _fused(graph: TracedGraph, source: Node, cast: CastOptions) -> Call | None:
    """Return a producer's call that computes `cast` of the result of `source`; None: no fusion."""
    if source.target is operator.getitem:
        source, i = source.args
        return _of_gradients(graph, source, i, cast) if source.target is SWIGLU_BACKWARD else None
    producer = _PRODUCERS.get(source.target)
    return None if producer is None else producer.fused(graph, source, cast)


def _trace_amax(
    mode: ProxyTorchDispatchMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Trace ``torch_fp8::amax``."""
    x, known = args[0], None
    if isinstance(x, FakeTensor):
        graph = TracedGraph(mode)
        source = graph.source_of(x)
        if source is not None and source.target in _PRODUCERS:
            known = _PRODUCERS[source.target].amax(graph, source)
    if known is not None:
        return graph.tensor_of(known)
    with mode:
        return tensor_amax(x)


def _amax_of_norm(graph: TracedGraph, norm: Node) -> Node | None:
    x, weight, rstd, offset, out_dtype = norm.args
    for node in graph.calls(_ops.rms_norm_statistics.default, x, weight):
        if node in rstd.args and node.args[3:5] == (offset, out_dtype):
            return result(node, 1)
    return None


def _amax_of_product(graph: TracedGraph, product: Node) -> Node:
    save = _ops.swiglu_save.default
    node = next(graph.calls(save, *product.args), None)
    if node is None:  # nothing is saved
        node = graph.node_of_call(Call(save, (*product.args, False)))
    return result(node, 4)


def _amax_of_joined_gradient(graph: TracedGraph, backward: Node) -> Node:
    return graph.node_of_call(Call(_ops.gate_up_backward_amax.default, backward.args[:7]))


def _of_norm(graph: TracedGraph, norm: Node, cast: CastOptions) -> Call | None:
    x, weight, rstd, offset, out_dtype = norm.args
    # If the call that computed rstd also made this cast, reuse it.
    once = _ops.rms_norm_quantize_once.default
    for node in graph.calls(once, x, weight):
        of_it = node in rstd.args and node.args[3:5] == (offset, out_dtype)
        if of_it and _is_made_by(cast, CastOptions(*node.args[5:12])):
            return Call(once, node.args)
    amax: Any = None
    if cast.needs_amax:
        amax = _amax_of_norm(graph, norm)
        if amax is None:
            return None
    args = (x, weight, rstd, offset, out_dtype, *cast._replace(amax=amax))
    return Call(_ops.rms_norm_quantize.default, args)


def _of_product(graph: TracedGraph, product: Node, cast: CastOptions) -> Call | None:
    amax: Any = None
    quantized = _ops.swiglu_quantize.default
    if cast.needs_amax:
        for save in graph.calls(_ops.swiglu_save.default, *product.args):
            amax = result(save, 4)
        if amax is None:
            return None
    cast = cast._replace(amax=amax)
    for node in graph.calls(quantized, *product.args):
        if _is_made_by(cast, CastOptions(*node.args[3:10])):
            return Call(quantized, node.args)
    return Call(quantized, (*product.args, *cast, False))


def _of_gradients(graph: TracedGraph, backward: Node, i: int, cast: CastOptions) -> Call | None:
    if cast.granularity == "rowwise" or cast.scale is not None:
        return None
    cast = _with_amax(graph, _ops.swiglu_backward_amax.default, backward.args, cast)
    return Call(_ops.swiglu_backward_quantize.default, (*backward.args, *cast), 4 * i)


def _of_joined_gradient(graph: TracedGraph, backward: Node, cast: CastOptions) -> Call | None:
    cast = _with_amax(graph, _ops.gate_up_backward_amax.default, backward.args[:7], cast)
    return Call(_ops.gate_up_backward_quantize.default, (*backward.args, *cast))


def _with_amax(
    graph: TracedGraph, func: Any, args: tuple[Any, ...], cast: CastOptions
) -> CastOptions:
    """Return the cast with the amax from ``func(*args)``, if it needs one."""
    if not cast.needs_amax:
        return cast
    amax: Any = graph.node_of(graph.results(Call(func, args)))
    return cast._replace(amax=amax)


def _as_node(argument: Any) -> Node | None:
    return argument if isinstance(argument, Node) else None


def result(call: Node, i: int) -> Node:
    """Return the node of the i-th result of a call."""
    return next(n for n in call.users if n.target is operator.getitem and n.args[1] == i)


SWIGLU_BACKWARD = _ops.swiglu_backward.default
_PRODUCERS = {
    _ops.rms_norm.default: _Producer(_ops.rms_norm_quantize.default, _of_norm, _amax_of_norm),
    _ops.swiglu.default: _Producer(_ops.swiglu_quantize.default, _of_product, _amax_of_product),
    _ops.gate_up_backward.default: _Producer(
        _ops.gate_up_backward_quantize.default, _of_joined_gradient, _amax_of_joined_gradient
    ),
}
for _name, _rule in (("quantize_2d", _trace_cast), ("amax", _trace_amax)):
    torch.library.register_torch_dispatch(f"torch_fp8::{_name}", ProxyTorchDispatchMode, _rule)
