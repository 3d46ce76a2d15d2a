"""`LayerObserver`: observes the operands that one layer's GEMMs multiply in a measured step."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.autograd.current_pass import is_traced
from torch_fp8.monitor.statistics import clip_statistics, operand_statistics, worst
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.quantize import QuantizedTensor, quantize
from torch_fp8.ops.smooth import column_amax, smooth_factors
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.dtensor import local, waited
from torch_fp8.tensor.split_weight import stored

INPUT, WEIGHT, GRAD_OUTPUT = "input", "weight", "grad_output"


class Observation:
    """The observations of all layers in one step.

    Args:
        clip_search: whether to search for the clip of gradients.
        failed: a function called with an error in an observation.
    Attributes:
        seen: statistics by place, from forwards with gradients and their backwards.
        idle: the same from forwards without gradients in training mode.
        goes_on: whether the step is still running.
    """

    def __init__(self, clip_search: bool, failed: Callable[[Exception], None]) -> None:
        self.clip_search, self.failed = clip_search, failed
        self.seen: dict[str, Tensor] = {}
        self.idle: dict[str, Tensor] = {}
        self.goes_on = True

    def look(self, place: str, statistics: Callable[[], Tensor]) -> None:
        """Store the statistics of a place, the first ones of the step, unless it is over."""
        if self.goes_on and place not in self.seen:
            with apart(), guarded(self.failed):
                self.seen[place] = statistics()


class LayerObserver:
    """Observes the operands of one layer's GEMMs; dropped when the layer is copied or pickled.

    Args:
        step: the observation that it belongs to.
        name: the layer's qualified name.
        layer: the layer.
        seen: the dict for the statistics.
    """

    def __init__(
        self, step: Observation, name: str, layer: Float8Layer, seen: dict[str, Tensor]
    ) -> None:
        self.step, self.name, self.layer, self.seen = step, name, layer, seen
        self._looked: set[Any] = set()
        self._idle: LayerObserver | None = None

    def without_gradients(self, training: bool) -> "LayerObserver | None":
        """Return the observer of a forward without gradients, or None if no step contains it.

        Args:
            training: whether the layer is in training mode.
        """
        if self._idle is None and training:
            self._idle = LayerObserver(self.step, self.name, self.layer, self.step.idle)
        return self._idle if training else None

    def weight(self, weight: Tensor, row: QuantizedTensor, factors: Tensor | None = None) -> None:
        """Observe the weight.

        Args:
            weight: the source, as it is stored.
            row: the operand (N, K) of fprop.
            factors: factors (K,) by which the operand's channels differ from the source's; or None.
        """
        self._look(WEIGHT, stored(weight), *self._as_stored(row, None), factors)

    def backward(
        self,
        grad_output: Tensor,
        row: QuantizedTensor | None,
        col: QuantizedTensor | None,
        weight: Tensor | None,
        weight_col: QuantizedTensor | None,
    ) -> None:
        """Observe the operands of backward.

        Args:
            grad_output: the source (..., N).
            row, col: the operands (M, N) of dgrad and (N, M) of wgrad; or None.
            weight: the source, as it is stored; or None.
            weight_col: the operand (K, N) of dgrad; or None.
        """
        self._look(GRAD_OUTPUT, grad_output, row, col)
        if weight is not None:
            self._look(WEIGHT, stored(weight), *self._as_stored(None, weight_col))

    def _as_stored(
        self, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        return (col, row) if self.layer.fp8.transposed else (row, col)

    def _look(
        self,
        kind: str,
        x: Tensor,
        row: QuantizedTensor | None,
        col: QuantizedTensor | None,
        factors: Tensor | None = None,
    ) -> None:
        if row is not None and self._key(kind, row, False, factors) in self._looked:
            row = None
        if col is not None and self._key(kind, col, True, factors) in self._looked:
            col = None
        if (row is None and col is None) or not self.step.goes_on:
            return
        with apart(), guarded(self.step.failed):
            first = 0
            if isinstance(x, QuantizableTensor):
                produced = x.before_cast((row, col))
                if produced is None:
                    return
                x, (row, col), first = produced
            x = matrix(x)
            if not x.numel():
                return
            if factors is not None:
                flips = kind == WEIGHT and self.layer.fp8.transposed
                x = x * (factors[:, None] if flips else factors)
            for payload, turned in ((row, False), (col, True)):
                key = None if payload is None else self._key(kind, payload, turned, factors)
                if payload is not None and key not in self._looked:
                    self._looked.add(key)
                    self._keep(kind, x, payload, turned, first)

    input = partialmethod(_look, INPUT)
    """Observe the input.

    Args:
        x: the source (..., K).
        row, col: the operands (M, K) of fprop and (K, M) of wgrad; or None.
        factors: factors (K,) by which the operands' channels differ from the source's; or None.
    """

    @staticmethod
    def _key(kind: str, payload: QuantizedTensor, turned: bool, factors: Tensor | None) -> Any:
        """Return a key for a payload; with square scale blocks the transpose has the same key."""
        return kind, turned and payload.granularity not in SQUARE, factors is None

    def _keep(
        self, kind: str, x: Tensor, payload: QuantizedTensor, turned: bool, first: int
    ) -> None:
        place, source = f"{self.name}/{kind}", x.to(payload.qdata.device)
        statistics = operand_statistics(source, payload, turned=turned, first=first)
        spec = self.layer.fp8.recipe.grad_output
        if kind == GRAD_OUTPUT and self.step.clip_search and spec.granularity == "tensorwise":
            statistics = torch.cat([statistics, clip_statistics(source, spec, statistics[0])])
        before = self.seen.get(place)
        self.seen[place] = statistics if before is None else worst(before, statistics)

    # ---- a layer that has left FP8 ---------------------------------------------------------------

    def before_paused(self, layer: Float8Layer, args: Any) -> None:
        """Observe input and weight before the forward of a paused layer."""
        if trains() and args:
            recipe = layer.fp8.recipe
            self._look_as_if(INPUT, args[0], recipe.input, recipe.smooth)
            if layer.frozen_weight is None:
                self._look_as_if(WEIGHT, layer.weight, recipe.weight)

    def after_paused(self, layer: Float8Layer, args: Any, output: Any) -> None:
        """Register an observation of the gradient of a paused layer's output."""
        if trains() and isinstance(output, Tensor) and output.requires_grad:
            spec = layer.fp8.recipe.grad_output
            output.register_hook(lambda grad: self._look_as_if(GRAD_OUTPUT, grad, spec))

    def _look_as_if(self, kind: str, x: Tensor, spec: Any, smooth: bool = False) -> None:
        if self.step.goes_on and f"{self.name}/{kind}" not in self.seen:
            with apart(), guarded(self.step.failed):
                x = matrix(x)
                if x.numel():
                    x = x * smooth_factors(column_amax(x))[0] if smooth else x
                    self._look(kind, x, quantize(x, spec), None)

    def __reduce__(self) -> Any:
        return type(None), ()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Run operators outside autograd and outside checkpoints' and watchers' dispatch modes."""
    with torch.no_grad(), contextlib.nullcontext() if is_traced() else _disable_current_modes():
        yield


def trains() -> bool:
    """Return whether this forward belongs to a training step.

    Generation and validation compute no gradients. A graph that is compiled now would observe in
    all steps. The module's mode doesn't matter, because a model may well train in evaluation mode.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def matrix(x: Tensor) -> Tensor:
    """Return this rank's values of a tensor as (R, C), without changing the tensor."""
    x = waited(local(x))
    if isinstance(x, QuantizableTensor):
        value = x.before_cast((None, None))
        return x.matrix() if value is None else value[0]
    return x.reshape(-1, x.shape[-1])  # not detached: that counts as a use of a weight


@contextlib.contextmanager
def guarded(failed: Callable[[Exception], None]) -> Iterator[None]:
    """Pass an error in this context to `failed`, because a monitor must never stop a run."""
    try:
        yield
    except Exception as error:
        failed(error)
