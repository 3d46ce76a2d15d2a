"""The product of a gated MLP and its gradients, computed in the form that a reader needs.

The product is cast when it is first read. Block-scaled casts and casts with delayed scaling need
nothing but the product, so they are made earlier, together with the tensors saved for backward. If
two layers read the two gradients, the first read casts both.
"""

from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.ops.quantize import as_layouts, quantize_layouts
from torch_fp8.ops.smooth import swiglu_save_columns
from torch_fp8.ops.swiglu import swiglu, swiglu_quantize, swiglu_save
from torch_fp8.ops.swiglu_backward import (
    gate_up_backward,
    gate_up_backward_amax,
    gate_up_backward_quantize,
    swiglu_backward,
    swiglu_backward_amax,
    swiglu_backward_quantize,
)
from torch_fp8.quantization.scaling import tensor_amax
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.producer import LazySource, Producer
from torch_fp8.tensor.quantizer import Quantizer


class Product(Producer):
    """The product ``silu(gate) * up`` (R, C), whose amax may be known.

    Args:
        gate, up: (R, C).
        amax: float32 amax of the product, (), or of its channels, (C,), or None if not known.
    """

    def __init__(self, gate: Tensor, up: Tensor, amax: Tensor | None = None) -> None:
        self._gate, self._up, self._amax = gate, up, amax

    def source(self, name: str) -> LazySource:
        """Return the product as a `LazySource` for the layers that read it.

        Args:
            name: qualified name of the MLP.
        """
        return LazySource(name, (self._gate, self._up), self)

    def dense(self) -> Tensor:
        return swiglu(self._gate, self._up, None)

    def layouts(self, options: CastOptions) -> Payloads:
        if options.needs_amax and self._amax is not None and not self._amax.ndim:
            options = options._replace(amax=self._amax)
        return self._cast(None, options)

    def amax(self) -> Tensor:
        if self._amax is not None and not self._amax.ndim:
            return self._amax
        return swiglu_save(self._gate, self._up, None, False)[-1]

    def channel_amax(self) -> Tensor:
        if self._amax is not None and self._amax.ndim:
            return self._amax
        return swiglu_save_columns(self._gate, self._up, False)[-1]

    def smoothed(self, factors: Tensor, options: CastOptions) -> Payloads:
        return self._cast(factors, options)

    def _cast(self, factors: Tensor | None, options: CastOptions) -> Payloads:
        results = swiglu_quantize(self._gate, self._up, factors, options, False)
        return as_layouts(results[:4], options)


def cast_and_save(
    gate: Tensor, up: Tensor, quantizer: Quantizer
) -> tuple[Payloads, tuple[Tensor, ...]]:
    """Cast the product, and encode gate and up for backward, in one read.

    Args:
        gate, up: (R, C).
        quantizer: quantizer of the down layer, block-scaled or tensorwise with a known scale.
    Returns:
        The payloads of the product; codes and scales of gate and of up.
    """
    options = quantizer.known_options(columnwise=quantizer.columnwise_usage)
    results = swiglu_quantize(gate, up, None, options, True)
    return as_layouts(results[:4], options), results[4:8]


class Gradients:
    """The gradients (R, C) of gate (0) and up (1), both cast when the first one is read.

    Args:
        inputs: arguments of the backward operators.
        readers: quantizers of the two layers that read the gradients, if their scales are known.
        in_graph: whether torch.compile traces, so that plain gradients exist anyway.
    """

    def __init__(
        self,
        inputs: BackwardInputs,
        readers: tuple[Quantizer, Quantizer] | None,
        in_graph: bool = False,
    ) -> None:
        self.inputs, self.readers, self.in_graph = inputs, readers, in_graph
        self._dense: dict[int, Tensor] = {}
        self._made: dict[tuple[int, CastOptions], Payloads] = {}
        self._amax: Tensor | None = None
        self._joined: LazySource | None = None

    def production(self, i: int, name: str) -> LazySource:
        """Return gradient `i` as a `LazySource`: half of the joined one for a group of layers."""
        if self._joined is None:
            self._joined = JoinedGradient(self.inputs, True).production(0, name)
        source = LazySource(name, (self.inputs.grad,), _OneGradient(self, i))
        source.half = self._joined, i
        return source

    def dense(self, i: int) -> Tensor:
        """Return gradient `i` as a plain tensor (R, C), which is not kept for a second call."""
        if i not in self._dense:
            self._dense = dict(enumerate(swiglu_backward(self.inputs)))
        return self._dense[i] if self.in_graph else self._dense.pop(i)

    def amax(self) -> Tensor:
        """Return the amaxes (2,) float32 of both gradients."""
        if self._amax is None:
            self._amax = swiglu_backward_amax(self.inputs)
        return self._amax

    def layouts(self, i: int, options: CastOptions) -> Payloads:
        """Return the payloads of gradient `i`, which are not kept for a second call."""
        if options.granularity == "rowwise" or not self._has_both_scales(i, options):
            return quantize_layouts(self.dense(i), options)
        key = (i, options._replace(scale=None, amax=None))
        if key not in self._made:
            casts = [options] * 2
            if options.scale is not None and self.readers is not None:
                other = self.readers[1 - i].source
                slot = None if options.amax is None else other.slot
                casts[1 - i] = options._replace(scale=other.scale, amax=slot)
            elif options.needs_amax:
                casts = [options._replace(amax=self.amax())] * 2
            of_gate, of_up = casts
            results = swiglu_backward_quantize(self.inputs, of_gate, of_up.scale, of_up.amax)
            for j in range(2):
                self._made[j, key[1]] = as_layouts(results[4 * j : 4 * j + 4], casts[j])
        return self._made.pop(key)

    def _has_both_scales(self, i: int, options: CastOptions) -> bool:
        """Return whether the scales of both gradients are known, or both are unknown."""
        if options.scale is None:
            return options.amax is None
        if self.readers is None:
            return False
        return self.in_graph or options.scale is self.readers[i].source.scale


class _OneGradient(Producer):
    """One of the two gradients."""

    def __init__(self, both: Gradients, i: int) -> None:
        self._both, self._i = both, i

    def dense(self) -> Tensor:
        return self._both.dense(self._i)

    def layouts(self, options: CastOptions) -> Payloads:
        return self._both.layouts(self._i, options)

    def amax(self) -> Tensor:
        if self._both.in_graph:
            return tensor_amax(self.dense())
        return self._both.amax()[self._i]


class JoinedGradient(Producer):
    """The gradient (R, 2 C) of a single layer for gate and up."""

    def __init__(self, inputs: BackwardInputs, gate_first: bool) -> None:
        self.inputs, self.gate_first = inputs, gate_first

    def production(self, i: int, name: str) -> LazySource:
        """Return the gradient as a `LazySource` for the layer."""
        return LazySource(name, (self.inputs.grad,), self)

    def dense(self, i: int = 0) -> Tensor:
        return gate_up_backward(self.inputs, self.gate_first)

    def amax(self) -> Tensor:
        return gate_up_backward_amax(self.inputs)

    def layouts(self, options: CastOptions) -> Payloads:
        if options.needs_amax:
            options = options._replace(amax=self.amax())
        results = gate_up_backward_quantize(self.inputs, self.gate_first, options)
        return as_layouts(results[:4], options)
