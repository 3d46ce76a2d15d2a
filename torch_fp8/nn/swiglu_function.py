"""A gated MLP's product and its gradients: what they become when they are read.

The product is cast by its reader's first question, or ahead of it, together with what is saved for
backward, where nothing but the product decides how: in blocks, or with delayed scaling. Of two
gradients that two layers take, both are cast when the first is asked for.
"""

from torch import Tensor

from torch_fp8.kernels.arguments import (
    BackwardInputs,
    CastOptions,
    DelayedCastOptions,
    ProducerCast,
)
from torch_fp8.ops.gate_up import (
    gate_up_backward,
    gate_up_backward_amax,
    gate_up_backward_quantize,
)
from torch_fp8.ops.quantize import as_layouts, quantize_layouts
from torch_fp8.ops.quantize_delayed import same_memory
from torch_fp8.ops.smooth import swiglu_save_columns
from torch_fp8.ops.swiglu import swiglu, swiglu_quantize, swiglu_save
from torch_fp8.ops.swiglu_backward import (
    swiglu_backward,
    swiglu_backward_amax,
    swiglu_backward_quantize,
)
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.lazy_quantized import LazySource
from torch_fp8.tensor.producer import Producer
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
            name: of the module.
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

    def delayed(self, options: DelayedCastOptions) -> tuple[Payloads, Tensor]:
        made = swiglu_quantize(self._gate, self._up, None, options, False)
        return as_layouts(made[:4], options), made[-1]

    def channel_amax(self) -> Tensor:
        if self._amax is not None and self._amax.ndim:
            return self._amax
        found = swiglu_save_columns(self._gate, self._up, False)[-1]
        assert found is not None
        return found

    def smoothed(self, factors: Tensor, options: CastOptions) -> Payloads:
        return self._cast(factors, options)

    def _cast(self, factors: Tensor | None, options: CastOptions) -> Payloads:
        made = swiglu_quantize(self._gate, self._up, factors, options, False)
        return as_layouts(made[:4], options)


def cast_and_save(
    gate: Tensor, up: Tensor, quantizer: Quantizer
) -> tuple[Payloads, Tensor | None, tuple[Tensor, ...]]:
    """The product cast, its amax where that is taken, and gate and up as they are saved: one read.

    Args:
        gate, up: (R, C).
        quantizer: of the layer behind: in blocks, or tensorwise with delayed scaling.
    """
    layouts = {"rowwise": True, "columnwise": quantizer.columnwise_usage}
    options: ProducerCast = CastOptions.of(quantizer.spec, **layouts)
    if quantizer.history is not None:
        options = quantizer.delayed_options(**layouts)
    made = swiglu_quantize(gate, up, None, options, True)
    amax = None if quantizer.history is None else made[8]
    return as_layouts(made[:4], options), amax, made[4:8]


class Gradients:
    """Both gradients, cast in one read when the first of them is asked for.

    Args:
        inputs: of both.
        readers: the quantizers of the two layers that take them, which differ in the history alone,
            if both do so with delayed scaling.
    """

    def __init__(self, inputs: BackwardInputs, readers: tuple[Quantizer, Quantizer] | None) -> None:
        self.inputs, self.readers = inputs, readers
        self._dense: dict[int, Tensor] = {}
        self._made: dict[tuple[int, CastOptions], Payloads] = {}
        self._delayed: dict[int, tuple[DelayedCastOptions, Payloads, Tensor]] = {}
        self._amax: Tensor | None = None

    def production(self, i: int, name: str) -> LazySource:
        """Gradient `i`."""
        kind = _OneGradient if self.readers is None else _OneDelayedGradient
        return LazySource(name, (self.inputs.grad,), kind(self, i))

    def delayed(self, i: int, options: DelayedCastOptions) -> tuple[Payloads, Tensor]:
        """Gradient `i` and its amax, with the other one's scale from its own history."""
        if i not in self._delayed or not _is_same(self._delayed[i][0], options):
            assert self.readers is not None
            other = self.readers[1 - i].history
            assert other is not None
            casts = [options._replace(amaxes=other.amaxes, progress=other.progress)] * 2
            casts[i] = options
            of_gate, of_up = casts
            made = swiglu_backward_quantize(self.inputs, of_gate, *of_up[:2])
            for j in range(2):
                layouts = as_layouts(made[4 * j : 4 * j + 4], options)
                self._delayed[j] = casts[j], layouts, made[8][j]
        _, layouts, amax = self._delayed.pop(i)
        return layouts, amax

    def cast_ahead(self) -> None:
        """In a compiled graph, let the layers' casts find both made, if these are as expected."""
        if self.readers is not None:
            of_gate, _ = self.readers
            columnwise = of_gate.columnwise_usage
            self.delayed(0, of_gate.delayed_options(rowwise=True, columnwise=columnwise))

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
        # A scale of each, or no fusion.
        if options.scale is not None or options.granularity == "rowwise":
            return quantize_layouts(self.dense(i), options)
        if (i, options) not in self._made:
            amax = self.amax() if options.needs_amax else None
            made = swiglu_backward_quantize(self.inputs, options._replace(amax=amax))
            for j in range(2):
                self._made[j, options] = as_layouts(made[4 * j : 4 * j + 4], options)
        return self._made.pop((i, options))


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


class _OneDelayedGradient(_OneGradient):
    """One of both where two layers take them, with delayed scaling."""

    def delayed(self, options: DelayedCastOptions) -> tuple[Payloads, Tensor]:
        return self._both.delayed(self._i, options)


class JoinedGradient(Producer):
    """The gradient (R, 2 C) of both in one."""

    def __init__(self, inputs: BackwardInputs, gate_first: bool) -> None:
        self.inputs, self.gate_first = inputs, gate_first

    def production(self, i: int, name: str) -> LazySource:
        """Return the gradient for the one layer that takes it."""
        return LazySource(name, (self.inputs.grad,), self)

    def delayed(self, options: DelayedCastOptions) -> tuple[Payloads, Tensor]:
        made = gate_up_backward_quantize(self.inputs, self.gate_first, options)
        return as_layouts(made[:4], options), made[4]

    def dense(self, i: int = 0) -> Tensor:
        return gate_up_backward(self.inputs, self.gate_first)

    def amax(self) -> Tensor:
        return gate_up_backward_amax(self.inputs)

    def layouts(self, options: CastOptions) -> Payloads:
        if options.needs_amax:
            options = options._replace(amax=self.amax())
        made = gate_up_backward_quantize(self.inputs, self.gate_first, options)
        return as_layouts(made[:4], options)


def _is_same(made: DelayedCastOptions, wanted: DelayedCastOptions) -> bool:
    return made[2:] == wanted[2:] and same_memory(made.amaxes, wanted.amaxes)
