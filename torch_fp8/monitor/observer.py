"""`Observer`: what is seen of a model in one step, with hooks that exist only in that step.

A hook before a layer's forward sees its input, one on its output the gradient that comes back. The
input of a layer behind a converted norm or gated MLP was never written in 16 bits; its values are
then computed once more from what the producer has, and thrown away (`LazyQuantizedTensor`), so that
what the layer itself reads is made as on any other step. Each is looked at once in a step: the
first forward of a layer counts, and neither other micro-batches nor what activation checkpointing
computes again.

A compiled model would not notice hooks that come later. In an observed step torch runs it eagerly
(``torch.compiler.set_stance``), which rounds as eager models do; the graphs are used again after
it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torch_fp8.monitor.statistics import (
    clip_statistics,
    logit_sharpness,
    operand_statistics,
)
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.paused import is_paused
from torch_fp8.nn.scaling_buffers import GRAD_OUTPUT, INPUT
from torch_fp8.ops.smooth import column_amax, smooth_factors
from torch_fp8.quantization.scaling import delayed_scale
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.dtensor import local, waited
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor

KINDS = {INPUT: "input", GRAD_OUTPUT: "grad_output"}


class Observer:
    """The hooks of one step, and what they have seen.

    Args:
        layers: qualified name and module of the layers.
        clip_search: whether to search the clip of gradients.
        head: the layer whose output is the logits, for their sharpness; or None.
        failed: told of an error in a hook.
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
        self._handles: list[RemovableHandle] = []
        self._stance: Any = None

    def install(self, *, eager: bool = False) -> None:
        """Put the hooks in place.

        Args:
            eager: whether a part of the model is compiled.
        """
        self.seen = {}
        for name, layer in self.layers:
            before, after = Hook(self._before(name)), Hook(self._after(name))
            self._handles.append(layer.register_forward_pre_hook(before))
            self._handles.append(layer.register_forward_hook(after))
        if self.head is not None:
            self._handles.append(self.head.register_forward_hook(Hook(self._after_head)))
        if eager:
            self._stance = torch.compiler.set_stance("force_eager")

    def remove(self) -> None:
        """Take the hooks away; what was seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)  # to what it was
            self._stance = None

    def _before(self, name: str) -> Any:
        place = f"{name}/{KINDS[INPUT]}"

        def before(layer: Float8Layer, args: Any) -> None:
            if _trains() and place not in self.seen and args:
                self._look(place, layer, INPUT, args[0])

        return before

    def _after(self, name: str) -> Any:
        place = f"{name}/{KINDS[GRAD_OUTPUT]}"

        def on_gradient(layer: Float8Layer, grad: Tensor) -> None:
            if self._handles and place not in self.seen:
                self._look(place, layer, GRAD_OUTPUT, grad)

        def after(layer: Float8Layer, args: Any, output: Any) -> None:
            if _trains() and isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda grad: on_gradient(layer, grad))

        return after

    def _after_head(self, head: nn.Module, args: Any, output: Any) -> None:
        if not (_trains() and isinstance(output, Tensor) and output.requires_grad):
            return
        logits = output.detach()

        def on_gradient(grad: Tensor) -> None:
            if self._handles and "logits" not in self.seen:
                with torch.no_grad(), guarded(self.failed):
                    self.seen["logits"] = logit_sharpness(_matrix(logits), _matrix(grad))

        output.register_hook(on_gradient)

    @torch.no_grad()
    def _look(self, place: str, layer: Float8Layer, operand: int, x: Any) -> None:
        with guarded(self.failed):
            rows = _matrix(x)
            if not rows.numel():
                return
            spec = layer.operand_spec(operand)
            if operand == INPUT and layer.fp8_recipe.smooth:  # what is cast has other scales
                rows = rows * smooth_factors(column_amax(rows))[0]
                scale = None
            else:
                scale = delayed_scale_of(layer, operand, rows)
            seen = operand_statistics(rows, spec, scale)
            if self.clip_search and operand == GRAD_OUTPUT and spec.granularity == "tensorwise":
                seen = torch.cat([seen, clip_statistics(rows, spec, seen[0])])
            self.seen[place] = seen


def delayed_scale_of(layer: Float8Layer, operand: int, x: Tensor) -> Tensor | None:
    """Return the () scale that delayed scaling casts x with; None where x decides itself."""
    if not layer.fp8_delayed or is_paused(layer):  # which begins anew when it returns
        return None
    quantizer = layer.quantizer(operand)
    assert quantizer.history is not None
    config = quantizer.config
    return delayed_scale(
        quantizer.history.amaxes,
        x.abs().amax().float(),
        quantizer.spec.format,
        config.amax_compute_algo,
        config.margin,
    )


def _trains() -> bool:
    """Whether this forward belongs to a step: generation and validation take no gradients, and a
    graph that is built now would look in all steps. A model may well train in evaluation mode.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _matrix(x: Tensor) -> Tensor:
    """Return a tensor's values, this rank's, as (R, C), and leave all that it holds as it is."""
    if isinstance(x, LazyQuantizedTensor):
        source = x.production
        dense = source.forms.dense
        return source.producer.dense() if dense is None else dense
    x = waited(local(x))
    if isinstance(x, QuantizableTensor):
        return x.matrix()
    return x.detach().reshape(-1, x.shape[-1])


class Hook:
    """A hook on a layer. A copy of the layer, and a file of it, has one that does nothing."""

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
