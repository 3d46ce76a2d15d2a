"""`Float8RMSNorm`: an RMSNorm that emits FP8 for FP8 layers and saves its input in FP8.

Conversion picks the RMSNorms of Hugging Face and torch (`torch_fp8.conversion.detect_producers`).

For backward it saves x in E4M3 with a scale for each 128 elements of a row, and one float32 rstd
per row: 1.03 bytes per element, where eager Hugging Face code saves 6 (x in float32 and the
normalized x in BF16). With ``FP8Config(save_activations="bf16")`` it saves x itself.

The result is computed in float32 and rounded once, even if the original module would round the
normalized x before it multiplies by the weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import (
    RunsFP8,
    is_plain,
    is_traced,
    is_transformed,
    saves_nothing,
)
from torch_fp8.autograd.function import (
    Function,
    addends_in_graph,
    as_text,
    of_text,
    once_differentiable,
    only_shape_matters,
    read_in_graph,
    reshaped,
    shape_of_result,
)
from torch_fp8.config import FP8Config
from torch_fp8.kernels.arguments import (
    CastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
)
from torch_fp8.nn.class_swap import is_fsdp_class
from torch_fp8.nn.trial_reads import TrialReads
from torch_fp8.ops.quantize import as_layouts, saved_stand_ins
from torch_fp8.ops.registry import is_visible
from torch_fp8.ops.rms_norm import (
    rms_norm,
    rms_norm_backward,
    rms_norm_quantize,
    rms_norm_quantize_once,
    rms_norm_statistics,
    sum_norm_quantize_once,
)
from torch_fp8.ops.scaled_mm import cast
from torch_fp8.quantization.formats import CAST_DTYPES
from torch_fp8.quantization.scaling import tensor_amax
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor, plain
from torch_fp8.tensor.producer import LazySource, Producer
from torch_fp8.tensor.quantizer import Quantizer, with_source


class RMSNormSpec(NamedTuple):
    """The formula of a norm: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``.

    Attributes:
        eps: constant added to the mean of squares.
        offset: 0 or 1.
        promotes: whether the result has the promoted dtype of x and weight; else that of x.
    """

    eps: float
    offset: float
    promotes: bool


class _Options(NamedTuple):
    name: str
    offset: float
    out_dtype: torch.dtype
    save_fp8: bool
    keep: bool
    quantizer: Quantizer | None = None
    """Quantizer of the layers that read the result, or None to return a plain tensor."""
    reader: Quantizer | None = None
    """Quantizer of the expected reader, if its scale is known and the result can be cast now."""
    on_read: Callable[[Quantizer], None] | None = None
    """Function that notes the first reader, or None to compute the result at once, as a tensor."""


@dataclass(eq=False)
class NormFP8:
    """State that conversion adds to an RMSNorm, as its attribute `fp8`.

    Attributes:
        name: qualified name of the norm, for errors.
        config: configuration of the norm.
        spec: formula of the norm.
        reads: attributes with which the norm has this formula.
        quantizer: quantizer of the FP8 layers that read the output, or None if there are none.
        groups: groups of layers that may read the output.
        reader: with delayed scaling, quantizer of the layer that read the last output first.
        casts: `quantizer` as a string constant for graphs of torch.compile.
    """

    name: str
    config: FP8Config
    spec: RMSNormSpec
    reads: TrialReads
    quantizer: Quantizer | None
    groups: tuple[Any, ...] = ()
    reader: Quantizer | None = None

    def __post_init__(self) -> None:
        self.casts = as_text(self.quantizer)

    def note_reader(self, quantizer: Quantizer) -> None:
        """Remember the quantizer that read an output first."""
        self.reader = quantizer

    def __getstate__(self) -> dict[str, Any]:  # a copy has readers of its own
        return {**self.__dict__, "reader": None}


class Float8RMSNorm(RunsFP8):
    """Mixin of a converted RMSNorm, in front of its own class.

    Shapes: input (..., C), weight (C,), output (..., C).
    """

    fp8: NormFP8
    weight: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:  # further arguments, or the input by keyword
            return super().forward(*args, **kwargs)
        x, compiling = plain(args[0]), torch.compiler.is_compiling()
        weight = None if compiling else self._parameters.get("weight")  # faster than the attribute
        weight = self.weight if weight is None else weight
        runs = self.runs_fp8 and (compiling or not is_transformed())
        usual = isinstance(weight, nn.Parameter) or type(weight) is Tensor
        usual = usual and is_plain(x) and self.fp8.reads.hold(self, self.fp8.name)
        if not (runs and usual and x.dtype in CAST_DTYPES and x.shape[-1:] == weight.shape):
            return super().forward(x)
        fp8, spec = self.fp8, self.fp8.spec
        save_fp8 = fp8.config.save_activations == "fp8"
        out_dtype = x.dtype
        if spec.promotes and weight.dtype != out_dtype:
            out_dtype = torch.promote_types(out_dtype, weight.dtype)
        # A separate argument: with dynamic=True, a float is an input of the graph.
        eps = spec.eps
        # If FSDP2 shards the norm alone, its weight is freed after forward: compute at once.
        alone = is_fsdp_class(type(self))
        if compiling:
            casts = None if alone else fp8.casts
            return _norm_in_graph(x, weight, eps, casts, spec.offset, out_dtype, save_fp8)
        waits = fp8.quantizer is not None and not alone
        if waits and not torch.is_grad_enabled():  # without autograd's bookkeeping
            matrix = x.reshape(-1, x.shape[-1])  # (..., C) -> (R, C)
            inputs = NormInputs(matrix.detach(), weight.detach(), eps, spec.offset, out_dtype)
            readers = _Unread(inputs), fp8.note_reader, inputs.weight
            source = LazySource(fp8.name, inputs[:2], *readers)
            return LazyQuantizedTensor(source, x.shape, out_dtype)
        options: Any = fp8.name, spec.offset, out_dtype, save_fp8, torch.is_grad_enabled()
        if waits:
            options = *options, fp8.quantizer, self._expected_reader(x), fp8.note_reader
        return _RMSNormFunction.apply(x, weight, eps, _Options(*options))

    def _expected_reader(self, x: Tensor) -> Quantizer | None:
        """Return the quantizer of the expected reader, if the result can be cast for it now.

        In evaluation it cannot, because each reader casts with its own scale.
        """
        reader = self.fp8.reader
        if reader is None or reader.source.scale is None or not self.training:
            return None
        scale = reader.source.scale
        return reader if type(scale) is type(x.detach()) and scale.device == x.device else None


class _RMSNormFunction(Function):
    """Map x (..., C) and weight (C,) to a `LazyQuantizedTensor`; in a graph see `with_source`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, options: _Options) -> Tensor:
        matrix = x.detach().reshape(-1, x.shape[-1])  # (..., C) -> (R, C)
        keep = options.keep and any(ctx.needs_input_grad[:2])
        save = keep and options.save_fp8
        dropped = options.keep and saves_nothing()
        col = options.keep and not dropped
        offset, out_dtype = options.offset, options.out_dtype
        inputs = NormInputs(matrix, weight.detach(), eps, offset, out_dtype)
        ctx.unread = None
        if keep:
            ctx.name, ctx.offset, ctx.shape, ctx.dtype = *options[:2], x.shape, x.dtype
        if options.on_read is None and options.quantizer is not None and is_traced():
            ctx.unread = unread = _Unread(inputs, save, x)
            if keep:
                ctx.save_for_backward(*((weight,) if save else (weight, x)))
            rstd, *_ = rms_norm_statistics(inputs, False)  # removed if nobody reads y
            y = reshaped(rms_norm(inputs.with_rstd(rstd)), x.shape)  # (R, C) -> (..., C)
            return with_source(y, LazySource(options.name, inputs[:2], unread))
        unread = _Unread(inputs, save and not dropped)
        source = _source(unread, inputs, options, col)
        rstd = unread.norm.rstd  # not later, when x may have been written
        if keep:
            of_x: Sequence[Tensor | None] = (x,)
            if save:
                of_x = saved_stand_ins(matrix) if dropped else unread.saved
            ctx.save_for_backward(weight, rstd, *of_x)
        if options.on_read is None:  # in a graph, or with a weight that FSDP2 frees
            y = reshaped(unread.dense(), x.shape)  # (R, C) -> (..., C)
            return y if options.quantizer is None else with_source(y, source)
        return LazyQuantizedTensor(source, x.shape, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        if ctx.unread is not None:  # traced together with forward, which has read the result by now
            saved = [ctx.unread.norm.rstd, *(saved or ctx.unread.saved)]
        rstd, x, *scale = saved
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        # (..., C) -> (R, C)
        grad, x = (t.reshape(-1, ctx.shape[-1]) for t in (plain(grad), x))
        arguments = (scale[0] if scale else None, weight, rstd, ctx.offset, ctx.dtype, wants_weight)
        grad_x, grad_weight = rms_norm_backward(NormBackwardInputs(grad, x, *arguments))
        dx = grad_x.view(ctx.shape) if wants_x else None  # (R, C) -> (..., C)
        return dx, cast(grad_weight, weight.dtype) if wants_weight else None, None, None


@torch.compiler.allow_in_graph
def _norm_in_graph(x: Tensor, weight: Tensor, eps: float, casts: str | None, *form: Any) -> Tensor:
    """Call `_RMSNormFunction` as a single node of Dynamo's graph; see `as_text`.

    Args:
        x, weight, eps: arguments of the function.
        casts: see `NormFP8`; None if no layer reads the result in FP8.
        form: `offset`, `out_dtype` and `save_fp8` of `_Options`.
    """
    if only_shape_matters(x):
        return shape_of_result(x.shape, form[1], x, weight)
    options: Any = "", *form, torch.is_grad_enabled(), None if casts is None else of_text(casts)
    return _RMSNormFunction.apply(x, weight, eps, _Options(*options))


class _Unread(Producer):
    """A norm's output, which is computed, like `saved` (x in FP8), when it is first read."""

    saved: Sequence[Tensor | None] = ()

    def __init__(self, inputs: NormInputs, save: bool = False, x: Tensor | None = None) -> None:
        self._inputs, self._save, self._x = inputs, save, x
        self._norm: NormWithRstd | None = None
        self._amax: Tensor | None = None

    @property
    def norm(self) -> NormWithRstd:
        """Arguments of the operators that need rstd, which is computed at first use."""
        if self._norm is None:
            rstd, self._amax, *saved = rms_norm_statistics(self._inputs, self._save)
            self._norm, self.saved = self._inputs.with_rstd(rstd), saved
        return self._norm

    def dense(self) -> Tensor:
        return rms_norm(self.norm)

    def own_parameter(self) -> Tensor:
        self._inputs = self._inputs._replace(weight=self._inputs.weight.clone())
        if self._norm is not None:
            self._norm = self._inputs.with_rstd(self._norm.rstd)
        return self._inputs.weight

    def amax(self) -> Tensor:
        norm = self.norm  # this may also compute the amax
        return tensor_amax(rms_norm(norm)) if self._amax is None else self._amax

    def layouts(self, options: CastOptions) -> Payloads:
        known = options.scale is not None or options.granularity.startswith("block")
        if self._norm is not None or (self._save and not known):
            if options.needs_amax:
                options = options._replace(amax=self.amax())
            return as_layouts(rms_norm_quantize(self.norm, options), options)
        results = self._of_sum(options) or rms_norm_quantize_once(self._inputs, options, self._save)
        self._norm, self.saved = self._inputs.with_rstd(results[4]), results[5:7]
        return as_layouts(results[:4], options)

    def _of_sum(self, options: CastOptions) -> tuple[Tensor | None, ...]:
        """Add what x is the sum of in the operator, in a graph for CUDA; return () elsewhere."""
        x = self._x
        if x is None or options.scale is None or not is_visible(x):
            return ()
        addends = addends_in_graph(x)
        if not addends or addends[0].dtype != x.dtype:
            return ()
        matrix, addend = (t.reshape(self._inputs.x.shape) for t in addends)  # (..., C) -> (R, C)
        inputs = self._inputs._replace(x=matrix)
        results: Any = sum_norm_quantize_once(inputs, addend, options, self._save)
        read_in_graph(x, results[7].view(x.shape))
        self._inputs = self._inputs._replace(x=results[7])
        return tuple(results[:7])


def _source(unread: _Unread, inputs: NormInputs, options: _Options, col: bool) -> LazySource:
    """Return an output for the layers that read it, cast now if the expected cast needs no amax.

    A block-scaled cast needs x only, and a cast with delayed scaling needs a known scale. Such a
    cast also computes the statistics.

    Args:
        unread, inputs, options: the output, the inputs of its operators, and the norm's options.
        col: whether backward will need the result transposed.
    """
    parameter = None if options.on_read is None else inputs.weight
    source = LazySource(options.name, inputs[:2], unread, options.on_read, parameter)
    quantizer, expected = options.quantizer, options.reader
    if quantizer is not None and quantizer.spec.granularity.startswith("block"):
        expected = quantizer
    if quantizer is not None and expected is not None:
        cast_options = expected.known_options(columnwise=col and quantizer.columnwise_usage)
        source.keep(expected, unread.layouts(cast_options))
    return source
