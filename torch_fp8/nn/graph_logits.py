"""`GraphLogits`: the output of an output layer in a graph of torch.compile.

Dynamo traces through ``__torch_function__`` of tensor subclasses, and AOTAutograd drops what no
output needs. So in a graph an output layer does compute its logits, as a subclass that also knows
its hidden states. Steps that programs take before their loss (`torch_fp8.nn.logit_steps`) return
further such logits. A cross entropy of them becomes `linear_cross_entropy` of the hidden states, an
operator of the graph. If nothing else reads the logits, the graph does not compute them.

Everything else reads plain logits in the graph, as it does without this package. A graph that
returned its logits would multiply six times, because AOTAutograd computes the gradient of each
output, even if it is zero. So not every graph has such logits: see `torch_fp8.nn.deferred_logits`.

Legend: H hidden features, V classes.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from torch_fp8.nn.head_call import autocast_state
from torch_fp8.nn.lazy_logits import OF_SHAPE, WRITERS, Recorded
from torch_fp8.nn.logit_steps import STEPS
from torch_fp8.tensor.base import map_tensors


class GraphCall:
    """One forward of an output layer in a graph; see `torch_fp8.nn.head_call.HeadCall`.

    Args:
        layer: the output layer.
        hidden: input (..., H).
        precision: ``bf16`` or ``fp8``, that of the products.

    Attributes:
        is_read: whether plain logits are computed, and perhaps written, so that losses use them.
    """

    requires_grad = True
    is_read = is_written = is_fused = is_observed = False
    begins = ()

    def __init__(self, layer: Any, hidden: Tensor, precision: str) -> None:
        self.layer, self.hidden, self.precision = layer, hidden, precision
        self.weight, self.bias = layer.weight, layer.bias
        self.autocast = autocast_state(hidden.device.type)
        self.dtype = self.autocast.get("dtype", hidden.dtype)

    def parameters(self, with_gradient: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, see `HeadCall.parameters`."""
        if with_gradient:
            return self.weight, self.bias
        return self.weight.detach(), None if self.bias is None else self.bias.detach()

    def present(self) -> Any:
        """Do nothing: a graph knows what is written between a call and its loss."""
        return contextlib.nullcontext()

    def note(self, num_bytes: int, reader: str) -> None:
        """Do nothing: a count of losses would be a guard of the graph."""


class _Plain:
    """Attribute whose assignment makes logits plain.

    Dynamo keeps assignments in mind while it traces, and repeats them for the tensors that leave a
    graph, because it returns or stores them, or because they are alive at a break.
    """

    @torch._disable_dynamo  # no graph contains this assignment
    def __set__(self, logits: Tensor, value: bool) -> None:
        vars(logits).clear()
        logits.__class__ = Tensor


class GraphLogits(Tensor):
    """Logits (..., V, ...) in a graph, with their origin; outside of it they are plain.

    Attributes:
        recorded: call of the output layer, and hidden states of the rows.
    """

    recorded: Recorded
    is_plain_outside = _Plain()

    @staticmethod
    def of(logits: Tensor, recorded: Recorded) -> "GraphLogits":
        """Return plain logits as those that `recorded` describes."""
        recorded.shape_of, recorded.parent = logits, None
        result = logits.as_subclass(GraphLogits)
        result.recorded = recorded
        result.is_plain_outside = True
        return result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = None
        if torch.compiler.is_compiling() and func not in OF_SHAPE:
            x = args[0] if args else None
            if func in STEPS and isinstance(x, GraphLogits) and not x.recorded.call.is_read:
                result = STEPS[func](func, Traced(x.recorded), *args[1:], **kwargs)
            if isinstance(result, Tensor):  # a loss
                return result
            # Within autograd functions, which have no gradient mode, Dynamo allows no such mark.
            if not isinstance(result, Traced) and (torch.is_grad_enabled() or func in WRITERS):
                map_tensors((args, kwargs), _read)
        with torch._C.DisableTorchFunctionSubclass():
            logits = func(*args, **kwargs)
        return GraphLogits.of(logits, result.recorded) if isinstance(result, Traced) else logits


def _read(x: Any) -> Any:
    if isinstance(x, GraphLogits):
        x.recorded.call.is_read = True
    return x


class Traced:
    """Logits in a graph as the functions of `torch_fp8.nn.logit_steps` see them."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.shape, self.ndim = recorded.shape_of.shape, recorded.shape_of.ndim
        self.dtype, self.device = recorded.shape_of.dtype, recorded.shape_of.device

    @staticmethod
    def of(recorded: Recorded) -> "Traced":
        return Traced(recorded)
