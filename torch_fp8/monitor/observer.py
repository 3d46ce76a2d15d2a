"""`Observer`: what is seen of a model in one step.

In a measured step each layer has a `LayerObserver`. The layer shows it the payloads that its GEMMs
multiply, beside the tensors that these were cast from, and the statistics compare the two. The
monitor casts nothing itself, so its numbers hold for the cast that ran, with the scale that it had:
made by the layer or by the norm or gated MLP before it, kept from an earlier forward, gathered in
FP8, or cast with an outdated history. Only a layer that is out of FP8 for a while has hooks, since
it multiplies no payload: its operands are cast as they would be if it were back.

The first micro-batch of a step counts. The second pass of a checkpoint adds what the first did not
make, the transposed input. A forward without gradients counts where a layer in training mode has no
other in the step, as frozen parts of a model have. Where two GEMMs multiply payloads of one tensor
that have other scales, the worse one counts.

The source of an input behind a converted norm or gated MLP was never written in 16 bits. It is
computed once more from what the producer has, and thrown away (`LazyQuantizedTensor`).

A compiled model would not notice an observer that comes later. In an observed step torch runs it
eagerly (``torch.compiler.set_stance``), which rounds as eager models do; the graphs are used again
after it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from torch_fp8.autograd.checkpoint_pass import torch_selective_pass, untraced
from torch_fp8.monitor.statistics import (
    clip_statistics,
    logit_sharpness,
    operand_statistics,
    worst,
)
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.paused import is_paused
from torch_fp8.ops.quantize import QuantizedTensor, quantize
from torch_fp8.ops.smooth import column_amax, smooth_factors
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.dtensor import local, waited

INPUT, WEIGHT, GRAD_OUTPUT = "input", "weight", "grad_output"


class Observer:
    """What is seen of the layers in one step.

    Args:
        layers: qualified name and module of the layers.
        clip_search: whether to search the clip of gradients.
        head: layer whose output is the logits, for their sharpness; or None.
        failed: called with an error in an observation.

    Attributes:
        seen: place to statistics, of forwards with gradients and of their backwards.
        idle: the same of forwards without gradients in training mode.
        watches: whether a measured step goes on.
    """

    def __init__(
        self,
        layers: Iterable[tuple[str, Float8Layer]],
        *,
        clip_search: bool = False,
        head: nn.Module | None = None,
        failed: Callable[[Exception], None],
    ) -> None:
        self.layers, self.clip_search, self.head = list(layers), clip_search, head
        self.failed = failed
        self.seen: dict[str, Tensor] = {}
        self.idle: dict[str, Tensor] = {}
        self.watches = False
        self._handles: list[RemovableHandle] = []
        self._stance: Any = None

    def install(self, *, eager: bool = False) -> None:
        """Begin to look at a step.

        Args:
            eager: whether a part of the model is compiled.
        """
        self.seen, self.idle, self.watches = {}, {}, True
        for name, layer in self.layers:
            of_layer = LayerObserver(self, name, layer, self.seen)
            layer.observe(of_layer)
            if is_paused(layer):
                hooks = Hook(of_layer.before_paused), Hook(of_layer.after_paused)
                self._handles.append(layer.register_forward_pre_hook(hooks[0]))
                self._handles.append(layer.register_forward_hook(hooks[1]))
        if self.head is not None:
            self._handles.append(self.head.register_forward_hook(Hook(self._after_head)))
        if eager:
            self._stance = torch.compiler.set_stance("force_eager")

    def remove(self) -> None:
        """Look no longer; what was seen stays."""
        if self.watches:
            for _, layer in self.layers:
                layer.observe(None)
        self.watches = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)  # to what it was
            self._stance = None

    def _after_head(self, head: nn.Module, args: Any, output: Any) -> None:
        if not (_trains() and isinstance(output, Tensor) and output.requires_grad):
            return
        logits = output.detach()

        def on_gradient(grad: Tensor) -> None:
            if self.watches and "logits" not in self.seen:
                with apart(), guarded(self.failed):
                    self.seen["logits"] = logit_sharpness(_matrix(logits), _matrix(grad))

        output.register_hook(on_gradient)


class LayerObserver:
    """Looks at the operands of one layer's GEMMs. Copies and files of the layer have none.

    Args:
        observer: of the step.
        name: qualified name of the layer.
        layer: the layer itself.
        seen: where statistics are left.
    """

    def __init__(
        self, observer: Observer, name: str, layer: Float8Layer, seen: dict[str, Tensor]
    ) -> None:
        self.observer, self.name, self.layer, self.seen = observer, name, layer, seen
        self._looked: set[Any] = set()
        self._idle: LayerObserver | None = None

    def without_gradients(self, training: bool) -> "LayerObserver | None":
        """Return the observer of a forward without gradients; None: it belongs to no step.

        Args:
            training: whether the layer is in training mode.
        """
        if self._idle is None and training:
            self._idle = LayerObserver(self.observer, self.name, self.layer, self.observer.idle)
        return self._idle if training else None

    def input(
        self,
        x: Tensor,
        row: QuantizedTensor,
        col: QuantizedTensor | None,
        factors: Tensor | None = None,
    ) -> None:
        """Look at the input.

        Args:
            x: source (..., K).
            row, col: operands (M, K) of fprop and (K, M) of wgrad; or None.
            factors: factors (K,) of the source's channels in the operands; or None.
        """
        self._look(INPUT, x, row, col, factors)

    def weight(self, weight: Tensor, row: QuantizedTensor, factors: Tensor | None = None) -> None:
        """Look at the weight.

        Args:
            weight: source, as it is stored.
            row: operand (N, K) of fprop.
            factors: factors (K,) of the source's channels in the operand; or None.
        """
        self._look(WEIGHT, weight, *self._as_stored(row, None), factors)

    def backward(
        self,
        grad_output: Tensor,
        row: QuantizedTensor | None,
        col: QuantizedTensor | None,
        weight: Tensor | None,
        weight_col: QuantizedTensor | None,
    ) -> None:
        """Look at the operands that backward adds.

        Args:
            grad_output: source (..., N).
            row, col: operands (M, N) of dgrad and (N, M) of wgrad; or None.
            weight: source, as it is stored; or None.
            weight_col: operand (K, N) of dgrad; or None.
        """
        self._look(GRAD_OUTPUT, grad_output, row, col)
        if weight is not None:
            self._look(WEIGHT, weight, *self._as_stored(None, weight_col))

    def _as_stored(
        self, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        return (col, row) if self.layer.fp8_transposed else (row, col)

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
        if (row is None and col is None) or not self.observer.watches:
            return
        with apart(), guarded(self.observer.failed):
            first = 0
            if isinstance(x, QuantizableTensor):
                found = x.before_cast(row, col)
                if found is None:
                    return
                x, row, col, first = found
            x = _matrix(x)
            if not x.numel():
                return
            if factors is not None:
                flips = kind == WEIGHT and self.layer.fp8_transposed
                x = x * (factors[:, None] if flips else factors)
            for payload, turned in ((row, False), (col, True)):
                key = None if payload is None else self._key(kind, payload, turned, factors)
                if payload is not None and key not in self._looked:
                    self._looked.add(key)
                    self._keep(kind, x, payload, turned, first)

    @staticmethod
    def _key(kind: str, payload: QuantizedTensor, turned: bool, factors: Tensor | None) -> Any:
        """Return what tells payloads apart; where scales are square, the transpose is the same."""
        return kind, turned and payload.granularity not in SQUARE, factors is None

    def _keep(
        self, kind: str, x: Tensor, payload: QuantizedTensor, turned: bool, first: int
    ) -> None:
        place, source = f"{self.name}/{kind}", x.to(payload.qdata.device)
        found = operand_statistics(source, payload, turned=turned, first=first)
        spec = self.layer.fp8_recipe.grad_output
        if kind == GRAD_OUTPUT and self.observer.clip_search and spec.granularity == "tensorwise":
            found = torch.cat([found, clip_statistics(source, spec, found[0])])
        before = self.seen.get(place)
        self.seen[place] = found if before is None else worst(before, found)

    # ---- a layer that is out of FP8 --------------------------------------------------------------

    def before_paused(self, layer: Float8Layer, args: Any) -> None:
        """Look at input and weight before the forward of a paused layer."""
        if _trains() and args:
            recipe, factors = layer.fp8_recipe, None
            with apart(), guarded(self.observer.failed):
                x, weight = _matrix(args[0]), _matrix(layer.weight)
                if x.numel() and recipe.smooth:
                    factors = smooth_factors(column_amax(x))[0]
                self._look_as_if(INPUT, x if factors is None else x * factors, recipe.input)
                if layer.frozen_weight is None:
                    self._look_as_if(WEIGHT, weight, recipe.weight)

    def after_paused(self, layer: Float8Layer, args: Any, output: Any) -> None:
        """Have the gradient of a paused layer's output looked at."""
        if _trains() and isinstance(output, Tensor) and output.requires_grad:
            spec = layer.fp8_recipe.grad_output
            output.register_hook(lambda grad: self._look_as_if(GRAD_OUTPUT, grad, spec))

    def _look_as_if(self, kind: str, x: Tensor, spec: Any) -> None:
        if self.observer.watches and f"{self.name}/{kind}" not in self.seen:
            with apart(), guarded(self.observer.failed):
                x = _matrix(x)
                if x.numel():
                    self._look(kind, x, quantize(x, spec), None)

    def __reduce__(self) -> Any:
        return type(None), ()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Operators in here leave nothing for autograd, nor in a pass of a checkpoint."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(untraced())
        if torch_selective_pass():
            stack.enter_context(_disable_current_modes())
        yield


def _trains() -> bool:
    """Whether this forward belongs to a step: generation and validation take no gradients, and a
    graph that is built now would look in all steps. A model may well train in evaluation mode.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _matrix(x: Tensor) -> Tensor:
    """Return a tensor's values, this rank's, as (R, C), and leave all that it holds as it is."""
    x = waited(local(x))
    if isinstance(x, QuantizableTensor):
        found = x.before_cast(None, None)
        return x.matrix() if found is None else found[0]
    return x.reshape(-1, x.shape[-1])  # not detached, which would count as a use of a weight


class Hook:
    """A hook on a layer. Copies and files of the layer have one that does nothing."""

    def __init__(self, look: Callable[..., None]) -> None:
        self.look: Callable[..., None] | None = look

    def __call__(self, *args: Any) -> None:
        if self.look is not None:
            self.look(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {"look": None}


class guarded:
    """Hands an error within to `failed`, for a monitor never stops a run."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.failed = failed

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.failed(error)
            return True
        return False
