"""`Quantizer`: casts one operand of a layer to FP8.

A linear layer has three operands: the input (..., K), the weight (N, K) and the gradient of the
output (..., N). Each has a quantizer with the format and granularity, the source of the scale, and
the ranks that share it. The term is Transformer Engine's.

Legend: M tokens, K in, N out; rowwise is a matrix (R, C) quantized along C, columnwise its
transpose (C, R) quantized along R.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_fp8.autograd.current_pass import is_traced, saves_nothing
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import (
    QuantizedTensor,
    quantize_layouts,
    quantize_layouts_and_sum,
    transposed,
)
from torch_fp8.ops.registry import is_visible
from torch_fp8.ops.scaled_mm import cast
from torch_fp8.quantization import scaling
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import ScaleSource, group_amax, scale_from_amax, tensor_amax
from torch_fp8.tensor.base import QuantizableTensor, SavedInput, input_stand_ins
from torch_fp8.tensor.halves import PayloadCast
from torch_fp8.tensor.payload_cache import PayloadCache
from torch_fp8.tensor.split_weight import SplitWeight


class Quantizer(NamedTuple):
    """Casts one operand of a layer.

    Attributes:
        spec: format and granularity.
        source: scale, if it is known before the cast, and slot that records the amax.
        group: process group of ranks with other parts of the operand, which need the same scale; or
            None.
        columnwise_usage: whether backward will need the transpose, for a producer that casts in
            advance.
    """

    spec: CastSpec
    source: ScaleSource
    group: Any = None
    columnwise_usage: bool = False

    def __call__(
        self,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        sum_dtype: torch.dtype | None = None,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None]:
        """Cast x (..., C) as a matrix (R, C), in one read.

        Args:
            x: float32, bfloat16 or float16; or a `QuantizableTensor`.
            rowwise, columnwise: whether to make the payload (R, C), and the transpose (C, R).
            sum_dtype: dtype of the sums (C,) over all rows, added in float32, or None for no sums.
        Returns:
            ``(rowwise, columnwise, sums)``, each None if not requested.
        """
        makes_payloads = isinstance(x, QuantizableTensor)
        source = None if makes_payloads else source_of(x)
        if source is not None or makes_payloads:
            sums, layouts = None, {"rowwise": rowwise, "columnwise": columnwise}
            if sum_dtype is not None:
                sums = cast(matrix(x).sum(0, dtype=torch.float32), sum_dtype)
            if source is None:
                return *type(x).quantize(x, self, **layouts), sums
            return *source.layouts(self, **layouts), sums
        x = x.reshape(-1, x.shape[-1])  # (..., C) -> (R, C)
        if not (rowwise or columnwise):
            sums = None if sum_dtype is None else cast(x.sum(0, dtype=torch.float32), sum_dtype)
            return None, None, sums
        options = self.options(x, rowwise=rowwise, columnwise=columnwise)
        if sum_dtype is None:
            return *quantize_layouts(x, options), None
        payloads, sums = quantize_layouts_and_sum(x, options, sum_dtype)
        return *payloads, sums

    def options(self, x: Tensor, *, rowwise: bool, columnwise: bool) -> CastOptions:
        """Return the options for casting x; its amax is recorded here or by the cast.

        Args:
            x: (R, C).
            rowwise, columnwise: whether to make the payload (R, C), and the transpose (C, R).
        """
        scale, slot = self.source.scale, self.source.slot
        if slot is not None and (scale is None or is_opaque(x)):
            largest = tensor_amax(x)
            self.source.record(largest)
            slot = None
            if scale is None and not (is_opaque(x) and self.group is None):
                slot = largest if self.group is None else group_amax(largest, self.group)
        spec = self.spec
        cast = spec.format.dtype, spec.granularity, spec.power_of_two
        return CastOptions(*cast, rowwise, columnwise, scale, slot)

    def known_options(self, *, columnwise: bool) -> CastOptions:
        """Return the options of a rowwise cast that needs no amax: known scale, or block scales."""
        scale, slot = self.source.scale, self.source.slot
        return CastOptions.of(self.spec, scale, slot, rowwise=True, columnwise=columnwise)

    @torch.no_grad()
    def shared_scale(self, x: Tensor) -> Tensor | None:
        """Return the () scale with which all ranks of the group cast their parts.

        Args:
            x: this rank's part.
        Returns:
            The scale, or None if the granularity has a scale for each row or block.
        """
        if self.spec.granularity != "tensorwise":
            return None
        if self.source.scale is not None and self.source.slot is None:
            return self.source.scale
        own = x.amax() if isinstance(x, QuantizableTensor) else tensor_amax(x)
        self.source.record(own)
        if self.source.scale is not None:
            return self.source.scale
        return scale_from_amax(
            group_amax(own, self.group), self.spec.format, self.spec.power_of_two
        )


class WeightQuantizer(NamedTuple):
    """Casts a layer's weight (N, K), or (K, N) if it is stored transposed.

    Attributes:
        quantizer: quantizer of the weight.
        cache: cache of the weight's payload for forwards without gradients, or None.
        transposed: whether the weight is stored as (K, N), which swaps the two payloads.
    """

    quantizer: Quantizer
    cache: PayloadCache | None = None
    transposed: bool = False

    def for_fprop(self, weight: Tensor) -> QuantizedTensor:
        """Return the weight (N, K), quantized along K: gathered, kept, or cast now."""
        flip = self.transposed
        if isinstance(weight, SplitWeight):
            halves, cast = weight.halves, PayloadCast(self.quantizer.spec, flip)
            if halves.cast is not None:
                payload = halves.current_payload(PayloadCast.of(cast.spec, flip))
                if payload is not None and halves.cast != cast:
                    payload = transposed(payload)
                if payload is not None:
                    return payload
            if halves.amax is not None and cast.needs_amax:
                return cast(halves)
            weight = halves.high
        layouts = {"rowwise": not flip, "columnwise": flip}
        if isinstance(weight, QuantizableTensor):
            row, col = type(weight).quantize(weight, self.quantizer, **layouts)
        else:
            row, col = quantize_layouts(weight, self.quantizer.options(weight, **layouts))
        layout: Any = col if flip else row  # (N, K), whichever way the weight is stored
        return layout

    def without_gradients(self, weight: Tensor, training: bool) -> QuantizedTensor:
        """Return `for_fprop` in a forward without gradients, possibly cached from an earlier one.

        Args:
            weight: weight in its stored layout.
            training: whether the layer is in training mode.
        """
        cache = self.cache
        if training or cache is None or torch.compiler.is_compiling():
            return self.for_fprop(weight)
        if self.quantizer.source.slot is not None or isinstance(weight, QuantizableTensor):
            return self.for_fprop(weight)
        version = cache.version_of(weight)
        return cache.evaluation_row(version, lambda: self.for_fprop(weight), weight.device)

    def kept_payload(self, weight: Tensor) -> QuantizedTensor | None:
        """Return the kept payload, in the stored layout, whose bytes backward reads; or None."""
        if not isinstance(weight, SplitWeight) or weight.halves.cast is None:
            return None
        halves, cast = weight.halves, PayloadCast.of(self.quantizer.spec, self.transposed)
        fits = halves.cast == cast and cast.serves_backward and halves.is_filled
        return scaling.payload_in_backward(halves.payload) if fits else None

    def for_dgrad(
        self, weight: Tensor, scale: Tensor | None, after: Tensor | None = None
    ) -> QuantizedTensor:
        """Return the transposed weight (K, N), quantized along N, for the layer's backward.

        Args:
            weight: weight that forward used.
            scale: () scale of the `for_fprop` payload, if one scale serves both; else None.
            after: see `torch_fp8.kernels.arguments.CastOptions`.
        """
        flip, spec = self.transposed, self.quantizer.spec
        layout: Any
        if isinstance(weight, QuantizableTensor):
            needs: dict[str, Any] = {"rowwise": flip, "columnwise": not flip}
            row, col = type(weight).quantize(weight, self.quantizer, **needs, after=after)
        else:
            if isinstance(weight, SplitWeight):
                payload = self.kept_payload(weight)
                if payload is not None:
                    layout = payload if flip else transposed(payload, after)
                    return layout
                weight = weight.halves.high
            options = CastOptions.of(spec, scale, after=after, rowwise=flip, columnwise=not flip)
            row, col = quantize_layouts(weight, options)
        layout = row if flip else col  # (K, N)
        return layout


class ChannelMaxima:
    """The largest magnitude of each input channel, (K,) float32, in a layer's last forward.

    Copies and pickles start empty.
    """

    amax: Tensor | None = None

    def __reduce__(self) -> Any:
        return ChannelMaxima, ()


class Quantizers(NamedTuple):
    """The quantizers of a layer's three operands.

    Attributes:
        input, grad_output: quantizers of the activations.
        weight: quantizer of the weight.
        channels: object that stores the maxima of the input's channels, or None.
        observer: monitor that sees each operand of a GEMM, together with its source
            (`torch_fp8.monitor.layer_observer.LayerObserver`), or None without a monitor.
    """

    input: Quantizer
    weight: WeightQuantizer
    grad_output: Quantizer
    channels: ChannelMaxima | None = None
    observer: Any = None

    def in_graph(self, training: bool, buffers: tuple[Any, ...]) -> "Quantizers":
        """Return these quantizers with the scales and slots of a graph's buffers.

        Args:
            training: whether amaxes of input and weight are recorded.
            buffers: see `torch_fp8.nn.scale_buffers.graph_buffers`.
        """
        row, scales, *slots = buffers  # (3, 4), or (L, 3, 4); () of input, weight and gradient
        slots = slots if training else [None, None, slots[2]]
        sources = [scaling.graph_source(scales, row, i, slot) for i, slot in enumerate(slots)]
        of_input, of_weight, of_gradient = sources
        weight = self.weight.quantizer
        if weight.spec.delayed:
            weight = weight._replace(source=of_weight)
        return self._replace(
            input=self.input._replace(source=of_input),
            weight=self.weight._replace(quantizer=weight),
            grad_output=self.grad_output._replace(source=of_gradient),
        )


class InputPayloads(NamedTuple):
    """The payload of a layer's input for fprop, and the tensors saved for wgrad.

    Attributes:
        rowwise: (M, K), quantized along K, or None if fprop runs in BF16.
        qdata, scale: tensors to save for backward, or None.
        source: object that turns the saved tensors into the wgrad payload in backward, or None if
            the payload itself is saved.
    """

    rowwise: QuantizedTensor | None
    qdata: Tensor | None
    scale: Tensor | None
    source: SavedInput | None


def quantize_input(
    quantizer: Quantizer,
    x: Tensor,
    *,
    wgrad: bool,
    fp8_wgrad: bool,
    dtype: torch.dtype,
    observer: Any = None,
) -> InputPayloads:
    """Cast the input of a layer for fprop, and for the wgrad that may follow.

    Args:
        quantizer: quantizer of the input.
        x: (..., K).
        wgrad: whether backward computes the gradient of the weight.
        fp8_wgrad: whether it does so in FP8.
        dtype: dtype in which x is saved for a wgrad in high precision.
        observer: monitor, see `Quantizers`.
    """
    saved = None
    if fp8_wgrad and isinstance(x, QuantizableTensor):
        saved = type(x).saved_for_backward(x)
    dropped = wgrad and saved is None and saves_nothing()
    columnwise = fp8_wgrad and saved is None and not dropped
    row, col, _ = quantizer(x, rowwise=True, columnwise=columnwise)
    assert row is not None
    if observer is not None:
        observer.input(x, row, col)
    if saved is not None:
        return InputPayloads(row, *saved)
    if dropped:
        return InputPayloads(row, *input_stand_ins(row, fp8_wgrad, dtype), None)
    if col is not None:
        return InputPayloads(row, col.qdata, col.scale, None)  # (K, M), along M
    return InputPayloads(row, matrix(x).to(dtype) if wgrad else None, None, None)


def is_opaque(x: Tensor) -> bool:
    """Return whether an operator on x is a single node of a graph, and so must not write a slot."""
    return is_traced() and not is_visible(x)


def matrix(x: Tensor) -> Tensor:
    """Return x (..., C) as a plain tensor (R, C)."""
    # A view where strides allow.
    return x.matrix() if isinstance(x, QuantizableTensor) else x.reshape(-1, x.shape[-1])


def with_source(x: Tensor, source: Any) -> Tensor:
    """Let a `torch_fp8.tensor.producer.LazySource` compute the casts of its result x (..., C).

    A graph of torch.compile does not compute x if only casts read it. An operator on x returns
    another tensor, which has no source.
    """
    x.fp8_source = source
    return x


def source_of(x: Tensor) -> Any:
    """Return the source of a result from `with_source`, also of a view that keeps its rows."""
    base: Any = x._base if isinstance(x, FunctionalTensor) else None
    if base is None or hasattr(x, "fp8_source"):
        return getattr(x, "fp8_source", None)
    keeps = x.shape[-1:] == base.shape[-1:] and x.numel() == base.numel() and x.is_contiguous()
    return getattr(base, "fp8_source", None) if keeps else None
