"""Producers cast with delayed scaling, too, in a graph that torch.compile traces.

In such a graph layers cast by ``torch_fp8::quantize_2d_delayed``, which writes a history. This
operator is examined one step earlier than others (`torch_fp8.compile.quantize_fusion`), where torch
still knows what it writes. As in eager code, a producer casts with the scale that its first
reader's history suggests, and every reader records the amax in its own. A producer has a launch
before that, which makes what backward saves: one operator does the work of both and takes its
place.

A checkpoint that repeats a forward finds the histories moved on. There an operator of its own makes
the scale, which is kept, and the cast takes it as given, both times.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    PythonFunctionalizeAPI,
)
from torch.fx import Node
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import CheckpointPolicy

import torch_fp8.ops.quantize_delayed  # noqa: F401, defines the operators
from torch_fp8.compile.quantize_fusion import SWIGLU_BACKWARD, VIEWS, Call, TracedGraph, result
from torch_fp8.kernels.arguments import CastOptions, DelayedCastOptions
from torch_fp8.quantization.scaling import tensor_amax

_ops: Any = torch.ops.torch_fp8
_higher_order: Any = torch.ops.higher_order


class _Known(NamedTuple):
    """What a graph already has for the cast of a producer's result.

    Attributes:
        amax: the amax of that result.
        scale: the scale that an earlier reader's history has suggested.
        call: the operator that makes the payload; None: a cast with a given scale does.
        gradient: the index among two gradients whose amaxes are one tensor; or None.
    """

    amax: Node
    scale: Node | None = None
    call: Call | None = None
    gradient: int | None = None


def _trace_cast(
    mode: FunctionalTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Trace ``torch_fp8::quantize_2d_delayed``, in place of functionalization."""
    x, options, (last, sum_dtype) = args[0], DelayedCastOptions(*args[1:8]), args[8:]
    _keep_scales()
    below = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if below is None or sum_dtype is not None or not isinstance(x, FunctionalTensor):
        return mode.__torch_dispatch__(func, types, args, kwargs)
    graph, functional = TracedGraph(below), PythonFunctionalizeAPI(mode)
    matrix, *history = functional.unwrap_tensors([x, options.amaxes, options.progress])
    nodes: list[Any] = [graph.node_of(t) for t in history]
    cast = options._replace(amaxes=nodes[0], progress=nodes[1])
    known = _known(graph, graph.source_of(matrix), cast)
    if known is None and not _in_checkpoint():
        return mode.__torch_dispatch__(func, types, args, kwargs)

    def tensor_of(node: Node) -> Any:
        return functional.wrap_tensors(graph.tensor_of(node))

    with mode:
        amax = tensor_amax(x) if known is None else tensor_of(known.amax)
        if known is not None and known.gradient is not None:
            amax = amax[known.gradient]
        scale = _ops.advance_history(options.amaxes, last, amax, *options[2:5])
        none = x.new_empty(0, dtype=torch.float32)
        if known is not None and known.call is not None:
            made = graph.results(known.call)[known.call.first : known.call.first + 3]
            return (*functional.wrap_tensors(tuple(made)), none)
        if known is not None and known.scale is not None:
            scale = tensor_of(known.scale)
        q, _, qt, _ = _ops.quantize_2d(x, *options.with_scale(scale))
        return q, scale, qt, none


def _trace_advance(
    mode: FunctionalTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Trace ``torch_fp8::advance_history``, in place of functionalization."""
    _keep_scales()
    return mode.__torch_dispatch__(func, types, args, kwargs)


def _in_checkpoint() -> bool:
    """Return whether a checkpoint may repeat what is traced now."""
    return "recompute" in get_current_meta()


def _keep_scales() -> None:
    """Have checkpoints keep the scales that were made in their regions.

    This has to wait until a region is traced, and a cast in backward is the last chance: torch
    writes its own policy on whatever an operator has put in the graph, when that returns.
    """
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or _in_checkpoint():
        return
    for target in (_higher_order.auto_functionalized, _higher_order.auto_functionalized_v2):
        for node in mode.tracer.graph.find_nodes(op="call_function", target=target, sort=False):
            if node.args[0] is _ops.advance_history.default and "recompute" in node.meta:
                for kept in (node, *node.users):
                    kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _known(graph: TracedGraph, source: Node | None, cast: DelayedCastOptions) -> _Known | None:
    if source is None or cast.amaxes is None or cast.progress is None:
        return None
    if source.target is operator.getitem:
        source, i = source.args
        return _of_gradient(graph, source, i, cast) if source.target is SWIGLU_BACKWARD else None
    find = _FIND.get(source.target)
    return None if find is None else find(graph, source, cast)


def _of_norm(graph: TracedGraph, norm: Node, cast: DelayedCastOptions) -> _Known | None:
    x, weight, rstd, offset, out_dtype = norm.args
    once, twice = _ops.rms_norm_quantize_delayed.default, _ops.rms_norm_quantize.default
    for func in (once, _ops.rms_norm_statistics.default):
        for made in graph.calls(func, x, weight):
            if made in rstd.args and made.args[3:5] == (offset, out_dtype):
                call = Call(once, (*made.args[:5], *cast, made.args[-1]))
                return _read(graph, made, call, (4, 7, 5, 6), Call(twice, norm.args))
    return None


def _of_product(graph: TracedGraph, product: Node, cast: DelayedCastOptions) -> _Known:
    once, twice = _ops.swiglu_quantize_delayed.default, _ops.swiglu_quantize.default
    save = _ops.swiglu_save.default
    made = next((c for func in (once, save) for c in graph.calls(func, *product.args)), None)
    if made is None:  # nothing is saved
        made = graph.node_of_call(Call(save, (*product.args, False)))
    call = Call(once, (*product.args, *cast, (*made.args, True)[3]))
    return _read(graph, made, call, (4, 5, 6, 7, 8), Call(twice, product.args))


def _read(
    graph: TracedGraph, made: Node, call: Call, results: tuple[int, ...], twice: Call
) -> _Known:
    """Cast a producer's result for its first reader, or for a further one.

    Args:
        made: the call that made the amax, with or without a cast for another reader.
        call: the operator that does this with a cast for this one; its last result is the amax.
        results: the indices among its results of those of an operator that does not cast.
        twice: a cast with a given scale: its first arguments.
    """
    dtype, _, _, row, col = call.args[-6:-1]
    if made.target is call.func:
        amax, (of, _, _, has_row, has_col) = _last(made), made.args[-6:-1]
        if of != dtype:
            return _Known(amax)
        if has_row >= row and has_col >= col:
            return _Known(amax, call=Call(made.target, made.args))
        return _Known(amax, result(made, 1))
    amax = result(made, results.index(max(results)))
    for cast in graph.calls(twice.func, *twice.args):
        of = CastOptions(*cast.args[len(twice.args) :][:7])
        scale: Any = of.scale
        if scale is not None and of.dtype == dtype:
            return _Known(amax, scale)
    if _in_checkpoint() or not _put_instead(graph, made, call, results):
        return _Known(amax)
    return _Known(amax, call=call)


def _of_joined_gradient(graph: TracedGraph, backward: Node, cast: DelayedCastOptions) -> _Known:
    call = Call(_ops.gate_up_backward_quantize_delayed.default, (*backward.args, *cast))
    return _Known(_last(graph.node_of_call(call)), call=call)


def _of_gradient(
    graph: TracedGraph, backward: Node, i: int, cast: DelayedCastOptions
) -> _Known | None:
    """Return one of the two gradients that `torch_fp8.nn.gated_mlp` has cast with both
    histories.
    """
    func = _ops.swiglu_backward_quantize_delayed.default
    for made in graph.calls(func, *backward.args):
        amaxes, _, *how, row, col, up_amaxes, _ = made.args[len(backward.args) :]
        alike = _is_same((amaxes, up_amaxes)[i], cast.amaxes) and how == list(cast[2:5])
        if alike and row >= cast.rowwise and col >= cast.columnwise:
            return _Known(_last(made), call=Call(func, made.args, 4 * i), gradient=i)
    return None


def _is_same(history: Node, other: Any) -> bool:
    """Return whether both are the same view of the same tensor."""
    return history is other or (history.target, history.args) == (other.target, other.args)


def _last(call: Node) -> Node:
    """Return the node of the last result of `call`."""
    return result(call, len(call.target._schema.returns) - 1)


def _put_instead(graph: TracedGraph, old: Node, call: Call, results: tuple[int, ...]) -> bool:
    """Replace an old call by `call`, which is at the end of the graph and gives the same results.

    Nodes in between that use the old results move behind it, if they are nothing but a producer's
    result and views of it; if there are others, nothing changes and False is returned.

    Args:
        results: for each of the old results, the equal one of `call`.
    """
    behind: dict[Node, None] = {}
    node = old.next
    while node.op != "root":
        if any(n is old or n in behind for n in node.all_input_nodes):
            if node.target not in (operator.getitem, *VIEWS, *_FIND):
                return False
            behind[node] = None
        node = node.next
    new = graph.node_of_call(call)
    last = next(iter(reversed(new.graph.nodes)))
    for node in behind:
        if node.args[0] is old:
            node.args = (new, results[node.args[1]])
        last.append(node)
        last = node
    return True


_FIND: dict[Any, Callable[[TracedGraph, Node, DelayedCastOptions], _Known | None]] = {
    _ops.rms_norm.default: _of_norm,
    _ops.swiglu.default: _of_product,
    _ops.gate_up_backward.default: _of_joined_gradient,
}
for _name, _rule in (("quantize_2d_delayed", _trace_cast), ("advance_history", _trace_advance)):
    torch.library.register_torch_dispatch(f"torch_fp8::{_name}", FunctionalTensorMode, _rule)
