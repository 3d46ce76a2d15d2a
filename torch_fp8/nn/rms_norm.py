"""`Float8RMSNorm`: an RMSNorm whose output FP8 layers take in FP8, and which saves its input so.

Converted are the RMSNorms of Hugging Face and torch, see `torch_fp8.conversion.detect_rms_norm`.

For backward it keeps x in E4M3 with a scale for each 128 elements of a row, and one float32 rstd
per row: 1.03 bytes an element, where eager Hugging Face code keeps 6 (x in float32 and the
normalized x in BF16). ``FP8Config(save_activations="bf16")`` keeps x itself.

The result is computed in float32 and rounded once, also where the module itself would round the
normalized x before the weight.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import (
    PLAIN,
    RunsFP8,
    is_transformed,
    saves_nothing,
)
from torch_fp8.autograd.function import (
    as_text,
    of_text,
    once_differentiable,
    only_shape_matters,
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
from torch_fp8.ops.fused_quantize import saved_stand_ins
from torch_fp8.ops.quantize import as_layouts
from torch_fp8.ops.rms_norm import (
    rms_norm,
    rms_norm_backward,
    rms_norm_quantize,
    rms_norm_quantize_once,
    rms_norm_statistics,
)
from torch_fp8.ops.scaled_mm import cast
from torch_fp8.quantization.scaling import tensor_amax
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor, plain
from torch_fp8.tensor.producer import LazySource, Producer
from torch_fp8.tensor.quantizer import Quantizer


class RMSNormSpec(NamedTuple):
    """What a norm computes: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``.

    Attributes:
        eps_name: the attribute that holds eps.
        offset: 0 or 1.
        promotes: whether the result has the common dtype of x and weight; else that of x.
    """

    eps_name: str
    offset: float
    promotes: bool


_PLAIN = (*PLAIN, nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Options(NamedTuple):
    name: str
    offset: float
    out_dtype: torch.dtype
    keep: bool
    save_fp8: bool
    quantizer: Quantizer | None
    """How the layers that read the result cast it; None: it is returned plain."""
    reader: Quantizer | None
    """The quantizer with the scale, if the result may be cast ahead."""
    waits: bool
    """Whether the result is computed when it is read."""

    def inputs(self, x: Tensor, weight: Tensor, eps: float) -> NormInputs:
        """Return the operators' arguments for x (R, C)."""
        return NormInputs(x.detach(), weight.detach(), eps, self.offset, self.out_dtype)


class NormFP8:
    """How one RMSNorm hands over FP8.

    Args:
        name: qualified name of the norm, for errors.
        config: the options of the norm.
        spec: what it computes.
        quantizer: cast of the FP8 layers that read the output; None: there are none.

    Attributes:
        casts: `quantizer` as a constant of a graph of torch.compile.
        reader: the quantizer of the layer that read the output first last time, with delayed
            scaling.
    """

    def __init__(
        self, name: str, config: FP8Config, spec: RMSNormSpec, quantizer: Quantizer | None
    ) -> None:
        self.name, self.config, self.spec, self.quantizer = name, config, spec, quantizer
        self.casts = as_text(quantizer)
        self.reader: Quantizer | None = None

    def note_reader(self, quantizer: Quantizer) -> None:
        """Remember which layer has read an output first."""
        self.reader = quantizer


class Float8RMSNorm(RunsFP8):
    """The part of a converted RMSNorm that goes in front of its own class.

    Shapes: input (..., C), weight (C,), output (..., C).
    """

    fp8: NormFP8
    weight: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:  # by keyword, or more than the input
            return super().forward(*args, **kwargs)
        x, compiling = plain(args[0]), torch.compiler.is_compiling()
        weight = None if compiling else self._parameters.get("weight")  # sooner than by attribute
        weight = self.weight if weight is None else weight
        runs = self.runs_fp8 and (compiling or not is_transformed())
        usual = isinstance(weight, nn.Parameter) or type(weight) is Tensor
        usual = usual and type(x) in _PLAIN
        if not (runs and usual and x.dtype in _DTYPES and x.shape[-1:] == weight.shape):
            stock: Tensor = super().forward(x)
            return stock
        fp8, spec = self.fp8, self.fp8.spec
        save_fp8 = fp8.config.save_activations == "fp8"
        out_dtype = x.dtype
        if spec.promotes and weight.dtype != out_dtype:
            out_dtype = torch.promote_types(out_dtype, weight.dtype)
        # By itself: compiled with dynamic=True it is an input of the graph, as a tensor is.
        eps = getattr(self, spec.eps_name)
        # Not where FSDP2 shards the norm by itself: the weight is gone after its forward.
        alone = is_fsdp_class(type(self))
        if compiling:
            casts = None if alone else fp8.casts
            return _norm_in_graph(x, weight, eps, spec.offset, out_dtype, save_fp8, casts)
        waits = fp8.quantizer is not None and not alone
        if waits and not torch.is_grad_enabled():  # without autograd's bookkeeping
            matrix = x.reshape(-1, x.shape[-1])
            inputs = NormInputs(matrix.detach(), weight.detach(), eps, spec.offset, out_dtype)
            source = LazySource(fp8.name, inputs[:2], _Unread(inputs), fp8.note_reader)
            return LazyQuantizedTensor(source, x.shape, out_dtype)
        options = _Options(
            fp8.name,
            spec.offset,
            out_dtype,
            torch.is_grad_enabled(),
            save_fp8,
            fp8.quantizer if waits else None,
            self._expected_reader(x) if waits else None,
            waits,
        )
        output: Tensor = _RMSNormFunction.apply(x, weight, eps, options, fp8.note_reader)
        return output

    def _expected_reader(self, x: Tensor) -> Quantizer | None:
        """Return what is to read this forward's result, if the result may be cast for it already.

        Not in evaluation, whose scales are those of whoever reads.
        """
        reader = self.fp8.reader
        if reader is None or reader.source.scale is None or not self.training:
            return None
        scale = reader.source.scale
        return reader if type(scale) is type(x.detach()) and scale.device == x.device else None


class _RMSNormFunction(torch.autograd.Function):
    """x (..., C), weight (C,) -> `LazyQuantizedTensor`; plain in a compiled graph, whose casts find
    what is made here (`torch_fp8.compile.quantize_fusion`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        options: _Options,
        on_read: Callable[[Quantizer], None] | None,
    ) -> Tensor:
        matrix = x.reshape(-1, x.shape[-1])
        keep = options.keep and any(ctx.needs_input_grad[:2])
        save = keep and options.save_fp8
        dropped = options.keep and saves_nothing()
        col = options.keep and not dropped
        inputs = options.inputs(matrix, weight, eps)
        produced = _Produced(inputs, options, save and not dropped, col)
        if keep:
            of_x: tuple[Any, ...] = (x,)
            if save:
                of_x = saved_stand_ins(matrix) if dropped else produced.saved
            ctx.save_for_backward(weight, produced.norm.rstd, *of_x)
            ctx.name, ctx.offset, ctx.shape, ctx.dtype = *options[:2], x.shape, x.dtype
        if on_read is None or not options.waits:
            return reshaped(produced.dense(), x.shape)
        return LazyQuantizedTensor(produced.production(on_read), x.shape, options.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, rstd, x, *scale = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad, x = (t.reshape(-1, ctx.shape[-1]) for t in (plain(grad), x))
        arguments = (scale[0] if scale else None, weight, rstd, ctx.offset, ctx.dtype, wants_weight)
        grad_x, grad_weight = rms_norm_backward(NormBackwardInputs(grad, x, *arguments))
        dx = grad_x.view(ctx.shape) if wants_x else None
        dw = cast(grad_weight, weight.dtype) if wants_weight else None
        return dx, dw, None, None, None


@torch.compiler.allow_in_graph
def _norm_in_graph(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out_dtype: torch.dtype,
    save_fp8: bool,
    casts: str | None,
) -> Tensor:
    """`_RMSNormFunction` as one call of a graph that Dynamo builds; see `as_text`."""
    if only_shape_matters(x):
        return shape_of_result(x.shape, out_dtype, x, weight)
    quantizer = None if casts is None else of_text(casts)
    keep = torch.is_grad_enabled()
    options = _Options("", offset, out_dtype, keep, save_fp8, quantizer, None, False)
    output: Tensor = _RMSNormFunction.apply(x, weight, eps, options, None)
    return output


class _Unread(Producer):
    """One output of a norm, of which nothing is computed before it is read."""

    def __init__(self, inputs: NormInputs) -> None:
        self._inputs = inputs
        self._norm: NormWithRstd | None = None
        self._amax: Tensor | None = None

    @property
    def norm(self) -> NormWithRstd:
        """The arguments of operators that take the statistics."""
        if self._norm is None:
            rstd, self._amax, *_ = rms_norm_statistics(self._inputs, False)
            self._norm = self._inputs.with_rstd(rstd)
        return self._norm

    def dense(self) -> Tensor:
        return rms_norm(self.norm)

    def amax(self) -> Tensor:
        norm = self.norm  # with which the amax comes
        return tensor_amax(rms_norm(norm)) if self._amax is None else self._amax

    def layouts(self, options: CastOptions) -> Payloads:
        if self._norm is not None:
            return self._later(options)
        results = rms_norm_quantize_once(self._inputs, options, False)
        self._norm = self._inputs.with_rstd(results[4])
        return as_layouts(results[:4], options)

    def _later(self, options: CastOptions) -> Payloads:
        if options.needs_amax:
            options = options._replace(amax=self.amax())
        return as_layouts(rms_norm_quantize(self.norm, options), options)


class _Produced(_Unread):
    """One output of a norm: its statistics at once, the rest when it is asked for.

    A cast in blocks needs nothing but x, one with delayed scaling a scale that is known: where one
    will be asked for it is made with the statistics, in the same read.

    Args:
        inputs: the operators' inputs.
        options: the norm's options.
        save: whether to keep x in FP8.
        col: whether a backward will want the result transposed.
    """

    def __init__(self, inputs: NormInputs, options: _Options, save: bool, col: bool) -> None:
        super().__init__(inputs)
        self.options = options
        self.made: Payloads | None = None
        quantizer = options.quantizer
        col = col and quantizer is not None and quantizer.columnwise_usage
        cast: CastOptions | None = None
        if quantizer is not None and quantizer.spec.granularity.startswith("block"):
            cast = quantizer.known_options(columnwise=col)
        elif quantizer is not None and options.reader is not None:
            cast = options.reader.known_options(columnwise=col)
        if cast is None:
            rstd, self._amax, *saved = rms_norm_statistics(inputs, save)
        else:
            results = rms_norm_quantize_once(inputs, cast, save)
            self.made = as_layouts(results[:4], cast)
            rstd, *saved = results[4:7]
        self.saved: tuple[Tensor | None, ...] = tuple(saved)
        self._norm = inputs.with_rstd(rstd)

    def production(self, on_read: Callable[[Quantizer], None]) -> LazySource:
        """Return the output as a `LazySource` for the layers that read it."""
        quantizer = self.options.reader or self.options.quantizer
        production = LazySource(self.options.name, self._inputs[:2], self, on_read)
        if self.made is not None and quantizer is not None:
            production.keep(quantizer, self.made)
        return production
