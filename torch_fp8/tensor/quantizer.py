"""`Quantizer`: how a layer casts one of its operands to FP8.

A linear layer has three operands: the input (..., K), the weight (N, K) and the gradient of the
output (..., N). Each is cast by a quantizer, which knows format and granularity, where the scale
comes from, and with which ranks it is shared. The word is Transformer Engine's.

Legend: M tokens, K in, N out; rowwise is a matrix (R, C) quantized along C, columnwise its
transpose (C, R) quantized along R.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.autograd.current_pass import (
    is_traced,
    saves_nothing,
    stand_in,
    torch_selective_pass,
)
from torch_fp8.config import FP8Config
from torch_fp8.kernels.arguments import CastOptions, DelayedCastOptions
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts
from torch_fp8.ops.quantize_dbias import quantize_layouts_and_sum
from torch_fp8.ops.quantize_delayed import History
from torch_fp8.ops.scaled_mm import cast
from torch_fp8.quantization.payload_shape import padded_rows, scale_shape
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import (
    delayed_scale,
    group_amax,
    past_amax,
    scale_from_amax,
)
from torch_fp8.tensor.base import QuantizableTensor, SavedInput
from torch_fp8.tensor.payload_cache import PayloadCache
from torch_fp8.tensor.split_weight import SplitWeight


class Quantizer(NamedTuple):
    """Casts one operand of a layer.

    Attributes:
        spec: format and granularity.
        config: the algorithm and margin of delayed scaling.
        group: ranks with other parts of the operand, which shall have the same scale; or None.
        history: amaxes of past casts, for delayed scaling.
        updates: whether a cast records the amax in the history, as it does in training.
        repeats: whether this cast was made before, in the first pass of a checkpoint: it takes the
            scale of then.
        columnwise_usage: whether backward will want the transpose, for a producer that casts before
            anybody asks.
        scale: () that is known already; see `settled`.
    """

    spec: CastSpec
    config: FP8Config
    group: Any = None
    history: History | None = None
    updates: bool = True
    repeats: bool = False
    columnwise_usage: bool = False
    scale: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        sum_dtype: torch.dtype | None = None,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None]:
        """Cast x (..., C), as a matrix, in one read.

        Args:
            x: float32, bfloat16 or float16; or a `QuantizableTensor`.
            rowwise, columnwise: the payloads to make.
            sum_dtype: dtype of the sums (C,) over all rows, added up in float32; None: not wanted.
        Returns:
            ``(rowwise, columnwise, sums)``, None for what was not asked for.
        """
        if isinstance(x, QuantizableTensor):
            sums = None
            if sum_dtype is not None:
                sums = cast(x.matrix().sum(0, dtype=torch.float32), sum_dtype)
            row, col = type(x).quantize(x, self, rowwise=rowwise, columnwise=columnwise)
            return row, col, sums
        x = x.reshape(-1, x.shape[-1])
        if self.history is not None and self.casts_by_history:
            layouts = {"rowwise": rowwise, "columnwise": columnwise}
            return self.history.cast(x, self.spec, self.config, **layouts, sum_dtype=sum_dtype)
        if self.reads_history and (rowwise or columnwise) and sum_dtype is None:
            assert self.history is not None
            layouts = {"rowwise": rowwise, "columnwise": columnwise}
            return self.history.copy().cast(x, self.spec, self.config, **layouts)
        scale = self.scale if self.history is None else self.delayed_scale(x, self.history)
        if not (rowwise or columnwise):
            sums = None if sum_dtype is None else cast(x.sum(0, dtype=torch.float32), sum_dtype)
            return None, None, sums
        spec = self.spec.format.dtype, self.spec.granularity, self.spec.power_of_two
        options = CastOptions(*spec, rowwise, columnwise, scale)
        if sum_dtype is None:
            return *quantize_layouts(x, options), None
        payloads, sums = quantize_layouts_and_sum(x, options, sum_dtype)
        return *payloads, sums

    @property
    def casts_by_history(self) -> bool:
        """Whether the cast itself finds the delayed scale, in the read that it takes anyway."""
        ahead = self.group is None and self.updates and not self.repeats
        return ahead and not torch_selective_pass()

    def delayed_options(self, *, rowwise: bool, columnwise: bool) -> DelayedCastOptions:
        """The cast that a producer fuses, with the scale that the history suggests."""
        assert self.history is not None
        layouts = {"rowwise": rowwise, "columnwise": columnwise}
        return self.history.options(self.spec, self.config, **layouts)

    @property
    def reads_history(self) -> bool:
        """Whether a cast takes its scale from the history and leaves that as it is.

        What records the amax and throws it away is one launch, where the rule's operations are a
        dozen; a compiled graph fuses these.
        """
        reads = self.history is not None and not (self.updates or self.repeats)
        return reads and self.group is None and not is_traced()

    def settled(self) -> "Quantizer":
        """The same with its history's scale, for as long as nobody records an amax in that.

        It asks the device whether the history is empty, and waits for the answer.
        """
        if self.history is None or not self.reads_history:
            return self
        amax, (amaxes, *_) = torch.zeros((), device=self.history.amaxes.device), self.history
        algorithm, margin = self.config.amax_compute_algo, self.config.margin
        if not past_amax(amaxes, algorithm).item():
            return self
        scale = delayed_scale(amaxes, amax, self.spec.format, algorithm, margin)
        return self._replace(history=None, scale=scale)

    def delayed_scale(self, x: Tensor, history: History) -> Tensor:
        """The () scale of x by its history, which records its amax in training."""
        if self.repeats:
            assert history.last is not None
            return history.last.clone()
        if self.updates and torch_selective_pass():
            with _disable_current_modes():  # what the second pass will not do
                history.advance(amax_of(x, self.group), self.spec, self.config)
            assert history.last is not None
            return history.last.clone()
        amax = amax_of(x, self.group)
        if self.updates:
            return history.advance(amax, self.spec, self.config)
        if self.reads_history:
            return history.copy().advance(amax, self.spec, self.config)
        algorithm, margin = self.config.amax_compute_algo, self.config.margin
        return delayed_scale(history.amaxes, amax, self.spec.format, algorithm, margin)

    @torch.no_grad()
    def shared_scale(self, x: Tensor) -> Tensor | None:
        """The () scale that all ranks of the group cast their parts with.

        Args:
            x: this rank's part.
        Returns:
            None where the granularity has a scale for each row or block.
        """
        if self.spec.granularity != "tensorwise":
            return None
        if self.history is not None:
            return self.delayed_scale(x, self.history)
        return scale_from_amax(amax_of(x, self.group), self.spec.format, self.spec.power_of_two)


class WeightQuantizer(NamedTuple):
    """Casts a layer's weight, (N, K), or (K, N) where it is stored transposed.

    Attributes:
        quantizer: how.
        cache: what is kept of the weight; or None.
        transposed: whether the weight is stored as (K, N): the payloads change places.
    """

    quantizer: Quantizer
    cache: PayloadCache | None = None
    transposed: bool = False

    def for_fprop(self, weight: Tensor) -> QuantizedTensor:
        """The weight (N, K), quantized along K: gathered so, kept so, or cast now."""
        flip = self.transposed
        cache = self._step_cache(weight)
        if cache is not None:
            return cache.training_row(weight, self.quantizer.spec)
        if isinstance(weight, SplitWeight):
            weight = weight.halves.high
        row, col, _ = self.quantizer(weight, rowwise=not flip, columnwise=flip)
        layout = col if flip else row
        assert layout is not None
        return layout

    def without_gradients(self, weight: Tensor, training: bool) -> QuantizedTensor:
        """The same as `for_fprop`, where no gradients are taken: perhaps from the last forward.

        Args:
            training: whether the layer is in training mode.
        """
        cache, history = self.cache, self.quantizer.history
        if training or cache is None or torch.compiler.is_compiling():
            return self.for_fprop(weight)
        records = history is not None and self.quantizer.updates
        if records or isinstance(weight, QuantizableTensor):
            return self.for_fprop(weight)
        return cache.evaluation_row(
            cache.version_of(weight),
            lambda: self.for_fprop(weight),
            weight.device,
            None if history is None else history.amaxes,
        )

    def _step_cache(self, weight: Tensor) -> PayloadCache | None:
        """Return what keeps the weight from one step of the optimizer to the next, if any does."""
        cache = self.cache
        if cache is None or cache.between_steps is None or torch.compiler.is_compiling():
            return None
        return cache if isinstance(weight, SplitWeight) else None

    def for_dgrad(
        self, weight: Tensor, scale: Tensor | None, grad_output: Tensor
    ) -> QuantizedTensor:
        """The transposed weight (K, N), quantized along N, in the layer's backward.

        Args:
            weight: as forward had it.
            scale: () of the payload of `for_fprop`, where one scale serves both.
            grad_output: what backward begins with: a compiled graph then makes the transpose there.
        """
        flip = self.transposed
        if isinstance(weight, QuantizableTensor):
            row, col = type(weight).quantize_in_backward(
                weight, self.quantizer, grad_output, rowwise=flip, columnwise=not flip
            )
        else:
            cache = self._step_cache(weight)
            if cache is not None and (layout := cache.col(weight)) is not None:
                return layout
            options = CastOptions.of(self.quantizer.spec, scale, rowwise=flip, columnwise=not flip)
            if isinstance(weight, SplitWeight):
                weight = weight.halves.high
            row, col = quantize_layouts(weight, options)
        layout = row if flip else col
        assert layout is not None
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
        input, grad_output: casts of the activations.
        weight: cast of the weight.
        channels: where the maxima of the input's channels are left, if they are looked for.
        observer: monitor to which each operand of a GEMM is shown beside its source
            (`torch_fp8.monitor.layer_observer.LayerObserver`); None: nobody looks.
    """

    input: Quantizer
    weight: WeightQuantizer
    grad_output: Quantizer
    channels: ChannelMaxima | None = None
    observer: Any = None

    def with_buffers(self, buffers: tuple[Tensor, ...]) -> "Quantizers":
        """The same with the histories of input and weight in these buffers, if there are any.

        Backward finds that of the gradient by itself, by `of_gradient`: what is made of a buffer in
        forward, torch's partitioner might keep as it was then. See `History.of_operand`.
        """
        if not buffers:
            return self
        of_input, of_weight = (History.of_operand(buffers, i) for i in range(2))
        weight = self.weight
        return self._replace(
            input=self.input._replace(history=of_input),
            weight=weight._replace(quantizer=weight.quantizer._replace(history=of_weight)),
        )

    def of_gradient(self, buffers: tuple[Tensor, ...]) -> Quantizer:
        """That of the output's gradient, with its history in these buffers, if there are any."""
        if not buffers:
            return self.grad_output
        return self.grad_output._replace(history=History.of_operand(buffers, 2))


class InputPayloads(NamedTuple):
    """A layer's input as fprop takes it, and what is saved of it for wgrad.

    Attributes:
        rowwise: (M, K), quantized along K.
        qdata, scale: to be saved, or None.
        source: who makes the payload for wgrad of what was saved; None: it is the payload.
    """

    rowwise: QuantizedTensor
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
        x: (..., K).
        wgrad: whether backward takes the gradient of the weight.
        fp8_wgrad: whether it does so in FP8.
        dtype: in which x is saved where it does not.
        observer: see `Quantizers`.
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
        return InputPayloads(row, col.qdata, col.scale, None)
    return InputPayloads(row, matrix(x).to(dtype) if wgrad else None, None, None)


def input_stand_ins(
    row: QuantizedTensor, fp8: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Stand-ins for what is saved of an input: its transposed payload and scale, or itself."""
    tokens, features = row.qdata.shape
    if not fp8:
        return stand_in((tokens, features), dtype, row.qdata), None
    tokens = padded_rows(tokens, row.granularity)
    qdata = stand_in((features, tokens), row.qdata.dtype, row.qdata)
    if row.granularity == "tensorwise":
        return qdata, row.scale
    shape = scale_shape(features, tokens, row.granularity)
    return qdata, stand_in(shape, torch.float32, row.qdata)


def matrix(x: Tensor) -> Tensor:
    """x (..., C) as a plain tensor (R, C)."""
    if isinstance(x, QuantizableTensor):
        return x.matrix()
    return x.reshape(-1, x.shape[-1])


def amax_of(x: Tensor, group: Any) -> Tensor:
    """`group_amax`; a `QuantizableTensor` knows its own, for which nothing is launched again."""
    if not isinstance(x, QuantizableTensor):
        return group_amax(x, group)
    amax = x.amax()
    return amax if group is None else group_amax(amax, group)


def output_dtype(input: Tensor) -> torch.dtype:
    """What a linear layer returns: autocast's dtype where autocast is on, else the input's."""
    return autocast_dtype(input.device.type) or input.dtype


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast; None where it is off, as it is on the meta device."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
