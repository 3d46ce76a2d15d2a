"""A gated MLP's product and its gradients: what they become when they are read.

The product is cast by its reader's first question, or ahead of it, together with what is saved for
backward, where nothing but the product decides how: in blocks, or with delayed scaling. Of two
gradients that two layers take, both are cast when the first is asked for.
"""

from typing import NamedTuple

from torch import Tensor

from torch_fp8.config import FP8Config
from torch_fp8.kernels.arguments import BackwardInputs
from torch_fp8.ops.fused_quantize import DelayedCast
from torch_fp8.ops.gate_up import (
    gate_up_backward,
    gate_up_backward_amax,
    gate_up_backward_quantize,
    gate_up_backward_quantize_delayed,
)
from torch_fp8.ops.quantize import as_layouts, quantize_layouts
from torch_fp8.ops.quantize_delayed import History, same_memory
from torch_fp8.ops.swiglu import swiglu, swiglu_quantize, swiglu_quantize_delayed
from torch_fp8.ops.swiglu_backward import (
    swiglu_backward,
    swiglu_backward_amax,
    swiglu_backward_quantize,
    swiglu_backward_quantize_delayed,
)
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import tensor_amax
from torch_fp8.tensor.lazy_quantized import LazySource, Payloads, delayed_layouts


def product(gate: Tensor, up: Tensor, amax: Tensor | None, name: str) -> LazySource:
    """``silu(gate) * up``, whose amax may be known.

    Args:
        gate, up: (R, C).
        amax: () float32 of the product, or None.
        name: of the module.
    """

    # None of these may hold the production: a cycle would keep gate and up until it is collected.
    def dense() -> Tensor:
        return swiglu(gate, up, None)

    def layouts(spec: CastSpec, scale: Tensor | None, row: bool, col: bool) -> Payloads:
        current = spec.granularity == "tensorwise" and scale is None
        if current and amax is None:
            return quantize_layouts(dense(), spec, None, row=row, col=col)
        made = swiglu_quantize(
            gate,
            up,
            None,
            amax if current else None,
            scale,
            spec.format.dtype,
            spec.granularity,
            spec.power_of_two,
            row,
            col,
            False,
        )
        return as_layouts(made[:4], spec, scale, row, col)

    def largest() -> Tensor:
        return tensor_amax(dense()) if amax is None else amax

    def delayed(how: DelayedCast) -> tuple[Payloads, Tensor]:
        made = swiglu_quantize_delayed(gate, up, None, how, False)
        return delayed_layouts(made, how), made[-1]

    return LazySource(name, (gate, up), dense, layouts, largest, delayed)


class Ahead(NamedTuple):
    """The cast of a layer behind, where it can be made as the product is computed.

    Attributes:
        spec: in blocks, or tensorwise with delayed scaling.
        col: whether a backward will want the product transposed.
        history: with delayed scaling, of the layer.
        config: of the layer.
    """

    spec: CastSpec
    col: bool
    history: History | None
    config: FP8Config


def cast_and_save(
    gate: Tensor, up: Tensor, ahead: Ahead
) -> tuple[Payloads, Tensor | None, tuple[Tensor, ...]]:
    """The product cast, its amax where that is taken, and gate and up as they are saved: one read.

    Args:
        gate, up: (R, C).
        ahead: how.
    """
    spec, col = ahead.spec, ahead.col
    if ahead.history is not None:
        how = ahead.history.casts(spec, ahead.config, row=True, col=col)
        made = swiglu_quantize_delayed(gate, up, None, how, True)
        return delayed_layouts(made, how), made[7], made[3:7]
    cast = (spec.format.dtype, spec.granularity, spec.power_of_two, True, col)
    made = swiglu_quantize(gate, up, None, None, None, *cast, True)
    return as_layouts(made[:4], spec, None, True, col), None, tuple(made[4:8])


class GradientReaders(NamedTuple):
    """The two layers that take both gradients with delayed scaling.

    Attributes:
        histories: of both.
        spec, config: of both layers.
        col: whether one of them takes a weight gradient in FP8.
    """

    histories: tuple[History, History]
    spec: CastSpec
    config: FP8Config
    col: bool


class Gradients:
    """Both gradients, cast in one read when the first of them is asked for.

    Args:
        inputs: of both.
        readers: of both, if both are taken with delayed scaling.
    """

    def __init__(self, inputs: BackwardInputs, readers: GradientReaders | None) -> None:
        self.inputs, self.readers = inputs, readers
        self._dense: dict[int, Tensor] = {}
        self._made: dict[tuple[int, CastSpec, bool, bool], Payloads] = {}
        self._delayed: dict[int, tuple[DelayedCast, Payloads, Tensor]] = {}
        self._amax: Tensor | None = None

    def production(self, i: int, name: str) -> LazySource:
        """Gradient `i`."""
        return LazySource(
            name,
            (self.inputs.grad,),
            lambda: self.dense(i),
            lambda spec, scale, row, col: self.layouts(i, spec, scale, row, col),
            lambda: self.amax()[i],
            None if self.readers is None else lambda how: self.delayed(i, how),
        )

    def delayed(self, i: int, how: DelayedCast) -> tuple[Payloads, Tensor]:
        """Gradient `i` and its amax, with the other one's scale from its own history."""
        if i not in self._delayed or not _is_same(self._delayed[i][0], how):
            assert self.readers is not None
            other = self.readers.histories[1 - i]
            casts = [how._replace(amaxes=other.amaxes, progress=other.progress)] * 2
            casts[i] = how
            made = swiglu_backward_quantize_delayed(self.inputs, *casts)
            for j in range(2):
                layouts = delayed_layouts(made[3 * j : 3 * j + 3], how)
                self._delayed[j] = casts[j], layouts, made[6][j]
        _, layouts, amax = self._delayed.pop(i)
        return layouts, amax

    def cast_ahead(self) -> None:
        """In a compiled graph, let the layers' casts find both made, if these are as expected."""
        if self.readers is not None:
            histories, spec, config, col = self.readers
            self.delayed(0, histories[0].casts(spec, config, row=True, col=col))

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

    def layouts(
        self, i: int, spec: CastSpec, scale: Tensor | None, row: bool, col: bool
    ) -> Payloads:
        """Gradient `i` in FP8."""
        if scale is not None or spec.granularity == "rowwise":  # a scale of each, or no fusion
            return quantize_layouts(self.dense(i), spec, scale, row=row, col=col)
        if (i, spec, row, col) not in self._made:
            tensorwise = spec.granularity == "tensorwise"
            made = swiglu_backward_quantize(
                self.inputs,
                self.amax() if tensorwise else None,
                None,
                spec.format.dtype,
                spec.granularity,
                spec.power_of_two,
                row,
                col,
            )
            for j in range(2):
                part = made[4 * j : 4 * j + 4]
                self._made[j, spec, row, col] = as_layouts(part, spec, None, row, col)
        return self._made.pop((i, spec, row, col))


class JoinedGradient:
    """The gradient (R, 2 C) of both in one; its methods are those of `Gradients`."""

    def __init__(self, inputs: BackwardInputs, gate_first: bool) -> None:
        self.inputs, self.gate_first = inputs, gate_first

    def production(self, i: int, name: str) -> LazySource:
        return LazySource(
            name, (self.inputs.grad,), lambda: self.dense(i), self.layouts, self.amax, self.delayed
        )

    def delayed(self, how: DelayedCast) -> tuple[Payloads, Tensor]:
        made = gate_up_backward_quantize_delayed(self.inputs, self.gate_first, how)
        return delayed_layouts(made, how), made[3]

    def dense(self, i: int) -> Tensor:
        return gate_up_backward(self.inputs, self.gate_first)

    def amax(self) -> Tensor:
        return gate_up_backward_amax(self.inputs)

    def layouts(self, spec: CastSpec, scale: Tensor | None, row: bool, col: bool) -> Payloads:
        current = spec.granularity == "tensorwise" and scale is None
        made = gate_up_backward_quantize(
            self.inputs,
            self.gate_first,
            self.amax() if current else None,
            scale,
            spec.format.dtype,
            spec.granularity,
            spec.power_of_two,
            row,
            col,
        )
        return as_layouts(made[:4], spec, scale, row, col)


def _is_same(made: DelayedCast, wanted: DelayedCast) -> bool:
    return made[2:] == wanted[2:] and same_memory(made.amaxes, wanted.amaxes)
