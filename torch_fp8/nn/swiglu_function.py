"""A gated MLP's product and its gradients: what they become when they are read.

The product is cast by its reader's first question, or ahead of it, together with what is saved for
backward, where nothing but the product decides how: in blocks, or with delayed scaling. Of two
gradients that two layers take, both are cast when the first is asked for.
"""

from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.ops.gate_up import (
    gate_up_backward,
    gate_up_backward_amax,
    gate_up_backward_quantize,
)
from torch_fp8.ops.quantize import as_layouts, quantize_layouts
from torch_fp8.ops.smooth import swiglu_save_columns
from torch_fp8.ops.swiglu import swiglu, swiglu_quantize, swiglu_save
from torch_fp8.ops.swiglu_backward import (
    swiglu_backward,
    swiglu_backward_amax,
    swiglu_backward_quantize,
)
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.producer import LazySource, Producer
from torch_fp8.tensor.quantizer import Quantizer


class Product(Producer):
    """``silu(gate) * up``, whose amax may be known.

    Args:
        gate, up: (R, C).
        amax: () float32 of the product, or (C,) of its channels, or None.
    """

    def __init__(self, gate: Tensor, up: Tensor, amax: Tensor | None = None) -> None:
        self._gate, self._up, self._amax = gate, up, amax

    def source(self, name: str) -> LazySource:
        """Return the product for the layers that read it.

        Args:
            name: the module's.
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
        amax = swiglu_save_columns(self._gate, self._up, False)[-1]
        assert amax is not None
        return amax

    def smoothed(self, factors: Tensor, options: CastOptions) -> Payloads:
        return self._cast(factors, options)

    def _cast(self, factors: Tensor | None, options: CastOptions) -> Payloads:
        results = swiglu_quantize(self._gate, self._up, factors, options, False)
        return as_layouts(results[:4], options)


def cast_and_save(
    gate: Tensor, up: Tensor, quantizer: Quantizer
) -> tuple[Payloads, tuple[Tensor, ...]]:
    """The product cast, and gate and up as they are saved: one read.

    Args:
        gate, up: (R, C).
        quantizer: what the layer behind casts with; in blocks, or tensorwise with a known scale.
    """
    options = quantizer.known_options(columnwise=quantizer.columnwise_usage)
    results = swiglu_quantize(gate, up, None, options, True)
    return as_layouts(results[:4], options), results[4:8]


class Gradients:
    """Both gradients, cast in one read when the first of them is asked for.

    Args:
        inputs: the arguments of both.
        readers: the quantizers of the two layers that take them, if their scales are known.
    """

    def __init__(self, inputs: BackwardInputs, readers: tuple[Quantizer, Quantizer] | None) -> None:
        self.inputs, self.readers = inputs, readers
        self._dense: dict[int, Tensor] = {}
        self._made: dict[tuple[int, CastOptions], Payloads] = {}
        self._amax: Tensor | None = None

    def production(self, i: int, name: str) -> LazySource:
        """Gradient `i`."""
        return LazySource(name, (self.inputs.grad,), _OneGradient(self, i))

    def dense(self, i: int) -> Tensor:
        """Gradient `i`, plain; to be asked for once."""
        if i not in self._dense:
            self._dense = dict(enumerate(swiglu_backward(self.inputs)))
        return self._dense.pop(i)

    def amax(self) -> Tensor:
        """(2,) float32."""
        if self._amax is None:
            self._amax = swiglu_backward_amax(self.inputs)
        return self._amax

    def layouts(self, i: int, options: CastOptions) -> Payloads:
        """Gradient `i` in FP8."""
        if options.granularity == "rowwise" or not self._has_both_scales(i, options):
            return quantize_layouts(self.dense(i), options)
        key = (i, options._replace(scale=None, amax=None))
        if key not in self._made:
            casts = [options] * 2
            if options.scale is not None and self.readers is not None:
                other = self.readers[1 - i].source
                casts[1 - i] = options._replace(scale=other.scale, amax=other.slot)
            elif options.needs_amax:
                casts = [options._replace(amax=self.amax())] * 2
            of_gate, of_up = casts
            of_both = (of_up.scale, of_up.amax) if of_up.scale is not None else (None, None)
            results = swiglu_backward_quantize(self.inputs, of_gate, *of_both)
            for j in range(2):
                layouts = as_layouts(results[4 * j : 4 * j + 4], casts[j])
                self._made[j, key[1]] = layouts
        return self._made.pop(key)

    def _has_both_scales(self, i: int, options: CastOptions) -> bool:
        """Return whether what is known of the one gradient's scale is known of the other's."""
        if options.scale is None:
            return options.amax is None
        return self.readers is not None and options.scale is self.readers[i].source.scale


class _OneGradient(Producer):
    """One of both gradients."""

    def __init__(self, both: Gradients, i: int) -> None:
        self._both, self._i = both, i

    def dense(self) -> Tensor:
        return self._both.dense(self._i)

    def layouts(self, options: CastOptions) -> Payloads:
        return self._both.layouts(self._i, options)

    def amax(self) -> Tensor:
        return self._both.amax()[self._i]


class JoinedGradient(Producer):
    """The gradient (R, 2 C) of both in one."""

    def __init__(self, inputs: BackwardInputs, gate_first: bool) -> None:
        self.inputs, self.gate_first = inputs, gate_first

    def production(self, i: int, name: str) -> LazySource:
        """Return the gradient for the one layer that takes it."""
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
