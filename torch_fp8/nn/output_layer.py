"""`OutputLayer`: the linear layer before a cross entropy, which returns uncomputed logits.

See `torch_fp8.nn.lazy_logits`, and `torch_fp8.nn.graph_logits` for graphs of torch.compile. The
layer returns plain logits in evaluation, without gradients, in graphs whose host is unknown, under
transforms and tracers, and within `torch_fp8.high_precision`.
"""

import warnings
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fp8.autograd import current_pass
from torch_fp8.autograd.current_pass import is_exporting, is_plain, is_transformed, warn_once
from torch_fp8.nn.class_swap import add_mixin, is_fsdp_class, param_groups
from torch_fp8.nn.deferred_logits import fuses
from torch_fp8.nn.graph_logits import GraphCall, GraphLogits
from torch_fp8.nn.head_call import HeadCall, autocast_state, memory_of
from torch_fp8.nn.lazy_logits import Recorded, empty_meta
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.logit_steps import logits_of
from torch_fp8.nn.loss_head import Precision
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.lazy_quantized import plain
from torch_fp8.tensor.split_weight import SplitWeight

_MOST_READS = 3
"""Number of forwards whose logits were read after which a layer without a fused loss stops."""

_NOTABLE = 2**28
"""Bytes of logits that a warning mentions."""


class HeadFP8:
    """State that conversion adds to an output layer, as its attribute `loss_head`.

    Args:
        name: qualified name of the layer.
        model: the converted model, in which FSDP2's modules are searched.
        was_frozen: whether the layer runs in FP8 because its weight was frozen at the conversion.

    Attributes:
        fused: number of losses that were computed without logits.
        reads: number of forwards whose logits were computed.
        step: file and name of a function whose graphs return no logits; see
            `torch_fp8.nn.deferred_logits`.
    """

    step: tuple[str, str] | None = None
    _searched: Any = None
    _record: Any = None

    def __init__(self, name: str, model: nn.Module, was_frozen: bool = False) -> None:
        self.name, self.model, self.was_frozen = name, weakref.ref(model), was_frozen
        self.fused = self.reads = 0
        self.warned = False

    def note(self, num_bytes: int, reader: str) -> None:
        """Count a fused loss, or logits of `num_bytes` that `reader` needs; warn of large ones."""
        self.fused += not num_bytes
        self.reads += num_bytes > 0
        if num_bytes >= _NOTABLE and not (self.warned or self.fused):
            self.warned = True
            warnings.warn(
                f"FP8: the logits of '{self.name}' are in memory, {num_bytes / 2**20:,.0f} MiB and "
                f"more, because {reader or 'a function'} reads them; F.cross_entropy of logits "
                "that are only cast, sliced, reshaped or scaled needs none",
                stacklevel=5,
            )

    @property
    def waits(self) -> bool:
        """Whether to defer the logits, because a loss has used them, or may."""
        return self.fused > 0 or self.reads < _MOST_READS

    def gather(self, weight: Tensor) -> Any:
        """Gather a weight that FSDP2 has freed; return the module to reshard, or None if unknown.

        A module that stays gathered would run the next forward with the values from before a step.
        """
        # the innermost first
        for module in sorted(self._fsdp_modules(), key=self._is_below, reverse=True):
            module.unshard()
            if memory_of(weight).untyped_storage().nbytes():
                return module
            module.reshard()
        return None

    def sharded(self, weight: Tensor) -> Tensor | None:
        """Return the sharded parameter from which FSDP2 has gathered a weight, or None."""
        if self._searched is not weight:
            groups = (group for m in self._fsdp_modules() for group in param_groups(m))
            records = (record for group in groups for record in group.fsdp_params)
            of_weight = [r for r in records if getattr(r, "unsharded_param", None) is weight]
            # no weak reference, with which torch.utils.swap_tensors refuses a tensor
            self._searched, self._record = weight, next(iter(of_weight), None)
        return None if self._record is None else self._record.sharded_param

    def _fsdp_modules(self) -> list[Any]:
        model = self.model()
        modules = [] if model is None else list(model.modules())
        return [m for m in reversed(modules) if is_fsdp_class(type(m))]

    def _is_below(self, module: nn.Module) -> bool:
        return any(vars(child).get("loss_head") is self for child in module.modules())

    def __getstate__(self) -> dict[str, Any]:
        state = {"name": self.name, "was_frozen": self.was_frozen}
        return {**state, "fused": 0, "reads": 0, "warned": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, model=lambda: None)


def add_loss_head(module: Any, name: str, model: nn.Module, was_frozen: bool = False) -> None:
    """Turn a linear layer of `model` into an `OutputLayer`, in place; see `HeadFP8`."""
    add_mixin(module, OutputLayer)
    module.loss_head = HeadFP8(name, model, was_frozen)


@torch.compiler.assume_constant_result
def _warn_of_training(name: str) -> None:
    """Warn that a layer is trained in FP8; in graphs this runs once, when they are traced."""
    warnings.warn(
        f"the weight of the output layer '{name}' was frozen at the conversion, so its products "
        "run in FP8 (loss_head='auto'); it is trained now, still in FP8. To train it in BF16, "
        "pass FP8Config(loss_head='bf16'), or unfreeze it before the conversion",
        stacklevel=2,
    )


@torch.compiler.assume_constant_result
def _note_graph(name: str, classes: int) -> None:
    """Warn that a graph has plain logits."""
    warn_once(
        f"FP8: the logits of '{name}' are in memory in a graph of torch.compile, {2 * classes:,} "
        "bytes or more for each token, because the graph is not that of a whole model, or FSDP2 "
        "gathers the weight in FP8; docs/loss_head.md lists what needs no logits"
    )


class OutputLayer(nn.Module):
    """Mixin of a converted output layer, in front of its own class.

    Shapes: input (..., H), weight (V, H), bias (V,), output (..., V).
    """

    loss_head: HeadFP8
    out_features: int
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        logits = self._uncomputed(input)
        return super().forward(input) if logits is None else logits

    def _uncomputed(self, input: Tensor) -> Any:
        """Return logits that are not computed yet, or None if this forward computes them."""
        head, in_graph = self.loss_head, torch.compiler.is_compiling()
        if head.was_frozen and self.weight.requires_grad:
            _warn_of_training(head.name)
            if not in_graph:
                head.was_frozen = False
        if not (self.training and torch.is_grad_enabled()):
            return None
        if current_pass.requested or is_exporting() or (not in_graph and is_transformed()):
            return None
        waits = fuses(head.step) if in_graph else head.waits
        if not waits:
            return _note_graph(head.name, self.out_features) if in_graph else None
        # FSDP2's own modules, and FSDP1, which shows views of its flat parameter, free the weight.
        flattened = not isinstance(self._parameters.get("weight"), nn.Parameter)
        if flattened or is_fsdp_class(type(self)):
            return None
        x, weight, bias = plain(input), self.weight, self.bias
        fp8 = isinstance(self, Float8Layer)
        if isinstance(self, Float8Layer) and (not self.runs_fp8 or self.fp8_adds_bias is False):
            return None
        # Eager code reads a split weight's BF16 half; some versions of Dynamo read the weight.
        usual = is_plain(weight) or (in_graph and isinstance(weight, SplitWeight))
        usual = usual or (fp8 and isinstance(weight, Float8FrozenWeight | SplitWeight))
        usual = usual or (fp8 and not in_graph and isinstance(weight, QuantizableTensor))
        usual = usual and is_plain(x) and (bias is None or is_plain(bias))
        if not usual or x.shape[-1:] != weight.shape[1:]:
            return _note_graph(head.name, self.out_features) if in_graph else None
        alike = fp8 or x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
        if not (alike and any(t is not None and t.requires_grad for t in (x, weight, bias))):
            return None
        if in_graph:
            logits = super().forward(input)
            graph: Any = GraphCall(self, x, self._precision)
            return GraphLogits.of(logits, Recorded(graph, x, logits, logits.ndim - 1))
        if isinstance(self, Float8Layer):
            self.fp8.called = True
        return self.logits_of(x)

    @property
    def _precision(self) -> Precision:
        is_fp8 = isinstance(self, Float8Layer) and not self.fp8.recipe.bf16_forward
        return "fp8" if is_fp8 else "bf16"

    def logits_of(self, x: Tensor, autocast: dict[str, Any] | None = None) -> Tensor:
        """Return the logits of x (..., H), outside of a graph uncomputed.

        Args:
            autocast: state of autocast, see `autocast_state`, or None for the current one.
        """
        if torch.compiler.is_compiling():
            with torch.autocast(**(autocast or autocast_state(x.device.type))):
                return super().forward(x)
        head, weight = self.loss_head, self.weight
        operands = x, weight, self.bias, self._precision
        call = HeadCall(head.name, *operands, head, self, autocast)
        call.is_observed = isinstance(self, Float8Layer) and self.fp8.observer is not None
        sizes = *x.shape[:-1], weight.shape[0]
        return logits_of(Recorded(call, x, empty_meta(sizes, call.dtype), len(sizes) - 1))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output for this weight and bias, which need not be its own."""
        if not isinstance(self, Float8Layer):
            return F.linear(x, weight, bias)
        own = self.__dict__
        others = {"weight": weight, "bias": bias}
        others = {n: t for n, t in others.items() if t is not getattr(self, n)}
        before = {n: own[n] for n in others if n in own}
        own.update(others)  # an attribute hides the Parameter of its name
        try:
            output: Tensor = super().forward(x)
        finally:
            for name in others:
                del own[name]
            own.update(before)
        return output
