"""The three GEMMs of a linear layer on FP8 payloads, as an autograd function.

``y = x w^T + b``, and in backward ``dx = g w`` and ``dw = g^T x``. Quantizers turn the operands
into payloads (`torch_fp8.tensor.quantizer`).

Legend: M tokens, K in, N out.
"""

import functools
import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import output_dtype, warn_of_decoding
from torch_fp8.autograd.function import (
    Function,
    differentiable_by,
    is_asked_for,
    is_returned,
    of_text,
    only_shape_matters,
    refuse_derivatives,
    reshaped,
    shape_of_result,
    written_in_backward,
)
from torch_fp8.nn.bf16_forward import linear_in_bf16
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.ops.scaled_mm import cast, scaled_matmul
from torch_fp8.ops.swiglu import swiglu_save
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.quantization.scaling import OF_TENSOR
from torch_fp8.tensor.dgrad_operands import dgrad_operands
from torch_fp8.tensor.lazy_quantized import plain
from torch_fp8.tensor.quantizer import (
    InputPayloads,
    Quantizer,
    Quantizers,
    WeightQuantizer,
    matrix,
    quantize_input,
)
from torch_fp8.tensor.saved_tensors import save_by_name, saved_by_name
from torch_fp8.tensor.split_weight import read_scale
from torch_fp8.tensor.weight_half import gradient_dtype


class CastOperands(NamedTuple):
    """The cast operands of fprop, and what backward needs from them.

    Attributes:
        input: payloads of the input for fprop and wgrad; with Smooth-SwiGLU, of ``x s``.
        weight: payload (N, K) of the weight; with Smooth-SwiGLU, of ``w / s``, or None if fprop
            runs in BF16.
        weight_scale: () scale of w itself, for dgrad, or None if the cast in dgrad computes it.
        inverse: (K,) float32, 1 / s, or None without Smooth-SwiGLU.
    """

    input: InputPayloads
    weight: QuantizedTensor | None
    weight_scale: Tensor | None
    inverse: Tensor | None = None


class PlainOperands:
    """Casts the input and the weight of fprop unchanged, without smoothing."""

    independent: ClassVar[bool] = True
    """Whether no cast needs the other operand: another module may cast the input in advance."""

    @staticmethod
    def cast(
        quantizers: Quantizers, x: Tensor, weight: Tensor, training: bool | None, **needs: Any
    ) -> CastOperands:
        """Cast the operands of fprop, and the input for the wgrad that may follow.

        Args:
            quantizers: quantizers of the layer.
            x: (..., K).
            weight: (N, K), or (K, N) if its quantizer is `transposed`.
            training: whether the layer is in training mode, or None if a backward may follow.
            needs: wgrad, fp8_wgrad and dtype of `torch_fp8.tensor.quantizer.quantize_input`.
        """
        if training is None:  # cast the weight first, while a collective may still fill x
            w = quantizers.weight.for_fprop(weight)
        else:
            w = quantizers.weight.without_gradients(weight, training)
        observer = quantizers.observer
        if observer is not None:
            observer.weight(weight, w)
        payloads = quantize_input(quantizers.input, x, **needs, observer=observer)
        # A tensorwise scale serves both layouts, so that backward need not compute it again.
        return CastOperands(payloads, w, w.scale if w.granularity == "tensorwise" else None)

    @staticmethod
    def save_swiglu(gate: Tensor, up: Tensor, save: bool) -> tuple[Tensor | None, ...]:
        """Return what `torch_fp8.ops.swiglu.swiglu_save` does for a product that is cast later."""
        return swiglu_save(gate, up, None, save)


class LinearOptions(NamedTuple):
    """The arguments of the function that are not tensors.

    Attributes:
        name: qualified name of the module, for errors.
        dtype, out_dtype: dtypes of input and output.
        recipe: formats and granularities of the GEMMs.
        quantizers: casts of the operands.
        emulate: whether the GEMMs run through the reference path.
        training: whether the layer is in training mode.
        operand_class: class that casts the operands of fprop.
    """

    name: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    recipe: Recipe
    quantizers: Quantizers
    emulate: bool
    training: bool
    operand_class: type[PlainOperands]

    def quantizers_of(self, buffers: tuple[Tensor, ...]) -> Quantizers:
        """Return the quantizers with the scales and slots of a graph's buffers, if it has any."""
        quantizers = self.quantizers
        return quantizers.in_graph(self.training, buffers) if buffers else quantizers


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: torch.Size,
    options: LinearOptions,
    *buffers: Tensor,
) -> Tensor:
    """Compute ``y = x w^T + b`` (..., N) on FP8 payloads.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        weight: (N, K), or (K, N) if its quantizer is `transposed`.
        bias: (N,) or None.
        shape: shape of x, which the caller has already read.
        options: other arguments.
        buffers: buffers of delayed scaling in a graph of torch.compile, which needs tensors as
            separate arguments; see `Quantizers.in_graph`.
    """
    # Generation is bound by the host, so it skips autograd's bookkeeping.
    if not torch.is_grad_enabled():
        quantizers = options.quantizers_of(buffers) if buffers else options.quantizers
        if quantizers.observer is not None:
            idle = quantizers.observer.without_gradients(options.training)
            quantizers = quantizers._replace(observer=idle)
        return fprop(x, weight, bias, shape, options, quantizers)[0]
    return LinearFunction.apply(x, weight, bias, shape, options, *buffers)


@functools.cache
def graph_options(
    text: str, dtype: torch.dtype, out_dtype: torch.dtype, training: bool
) -> LinearOptions:
    """Return the options of a layer in a graph; `text`: see `LayerFP8.casts`."""
    recipe, transposed, emulate, operand_class = of_text(text)
    specs = recipe.input, recipe.weight, recipe.grad_output
    x, w, g = [Quantizer(spec, OF_TENSOR) for spec in specs]
    quantizers = Quantizers(x, WeightQuantizer(w, transposed=transposed), g)
    return LinearOptions("", dtype, out_dtype, recipe, quantizers, emulate, training, operand_class)


@torch.compiler.allow_in_graph
def linear_in_graph(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: tuple[str, bool],
    scales: Tensor | None,
    *buffers: Tensor,
) -> Tensor:
    """Call `linear` as a single node of Dynamo's graph; AOTAutograd traces the operators inside.

    Args:
        x, weight, bias, buffers: arguments of `linear`; plain tensors.
        casts: `LayerFP8.casts`; whether the layer is in training mode.
        scales: `torch_fp8.tensor.split_weight.scales_of_block` of the weight.
    """
    if not torch.is_grad_enabled() and x.ndim == 3 and type(x.shape[1]) is int and x.shape[1] == 1:
        warn_of_decoding()
    out_dtype = output_dtype(x)
    options = graph_options(casts[0], x.dtype, out_dtype, casts[1])
    if only_shape_matters(x):
        features = weight.shape[1 if options.quantizers.weight.transposed else 0]
        return shape_of_result((*x.shape[:-1], features), out_dtype, x, weight, bias)
    written_in_backward(buffers[-1:])
    read_scale(weight, scales)
    return linear(x, weight, bias, x.shape, options, *buffers)


def fprop(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: torch.Size,
    options: LinearOptions,
    quantizers: Quantizers,
    *,
    gradients: bool = False,
    wgrad: bool = False,
    fp8_wgrad: bool = False,
) -> tuple[Tensor, CastOperands]:
    """Return y (..., N) and the cast operands.

    Args:
        x, weight, bias, shape: arguments of `linear`.
        quantizers: casts of the operands.
        gradients: whether a backward may follow; else a cached payload of the weight will do.
        wgrad, fp8_wgrad: see `torch_fp8.tensor.quantizer.quantize_input`.
    """
    dtype, recipe = options.out_dtype, options.recipe
    needs: dict[str, Any] = {"wgrad": wgrad, "fp8_wgrad": fp8_wgrad, "dtype": dtype}
    if recipe.bf16_forward:
        y, payloads = linear_in_bf16(x, weight, bias, shape, quantizers, **needs)
        return y, CastOperands(payloads, None, None)
    training = None if gradients else options.training
    operands = options.operand_class.cast(quantizers, x, weight, training, **needs)
    a, b = operands.input.rowwise, operands.weight
    assert a is not None
    assert b is not None
    fast_accum, emulate = recipe.fprop.fast_accum, options.emulate
    # (M, K) @ (N, K)^T, both along K
    y = scaled_matmul(a, b, dtype, bias=bias, fast_accum=fast_accum, emulate=emulate)
    return reshaped(y, (*shape[:-1], y.shape[-1])), operands  # (M, N) -> (..., N)


def _differentiable(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of input and bias in high precision, by torch's operators.

    The payload of the input has no graph behind it, so the gradient of the weight raises if it is
    needed, as do all gradients of sharded layers.
    """
    wants_dgrad, wants_wgrad, wants_bias = ctx.needs_input_grad[:3]
    sharded = ctx.options.quantizers.grad_output.group is not None
    if sharded or (wants_wgrad and is_asked_for(ctx, 1)):
        refuse_derivatives(ctx)
    grad, grad_input, grad_bias = plain(grad_output), None, None
    if wants_dgrad:
        weight = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))["weight"].to(grad.dtype)
        # (..., N) @ (N, K)
        product = grad @ (weight.t() if ctx.options.quantizers.weight.transposed else weight)
        grad_input = product.to(ctx.dtypes[0]).view(ctx.input_shape)
    if wants_bias:
        grad_bias = matrix(grad).sum(0, dtype=torch.float32).to(ctx.dtypes[2])
    return grad_input, None, grad_bias, None, None, *[None] * len(ctx.buffers)


class LinearFunction(Function):
    """``y = x w^T + b`` on FP8 payloads, with dgrad and wgrad; see `linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: torch.Size,
        options: LinearOptions,
        *buffers: Tensor,
    ) -> Tensor:
        wants_dgrad, wants_wgrad = ctx.needs_input_grad[:2]
        fp8_wgrad = wants_wgrad and options.recipe.wgrad is not None
        quantizers = options.quantizers_of(buffers) if buffers else options.quantizers
        needs = {"gradients": True, "wgrad": wants_wgrad, "fp8_wgrad": fp8_wgrad}
        y, operands = fprop(x, weight, bias, shape, options, quantizers, **needs)
        payloads = operands.input
        saved = {
            "weight": weight if wants_dgrad else None,
            "w_scale": operands.weight_scale,
            "x": payloads.qdata,  # (K, M) along M, or (M, K) in BF16, or as `source` saves it
            "x_scale": payloads.scale,
            "inverse": operands.inverse if fp8_wgrad else None,
        }
        save_by_name(ctx, saved)
        bias_dtype = None if bias is None else bias.dtype
        ctx.dtypes = options.dtype, gradient_dtype(weight), bias_dtype, weight.dtype
        ctx.options, ctx.name, ctx.buffers = options, options.name, buffers
        ctx.grad_output = quantizers.grad_output
        ctx.input_source, ctx.input_shape = payloads.source, shape
        return y

    @staticmethod
    @differentiable_by(_differentiable)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = saved_by_name(ctx)
        options: LinearOptions = ctx.options
        recipe, emulate = options.recipe, options.emulate
        wants_dgrad, wants_wgrad = ctx.needs_input_grad[:2]
        fp8_wgrad = wants_wgrad and recipe.wgrad is not None
        for_weight = options.quantizers.weight
        w = grad_input = grad_weight = None
        input_dtype, summed, bias_dtype, whole = ctx.dtypes
        weight_dtype = whole if summed != whole and is_returned(ctx, 1) else summed
        if fp8_wgrad and ctx.input_source is not None:
            ctx.input_source.start(saved["x"], saved.get("x_scale"))
        # (M, N) along N for dgrad, (N, M) along M for wgrad, (N,) for the bias; w (K, N), along N
        sum_dtype = bias_dtype if ctx.needs_input_grad[2] else None
        layouts: dict[str, Any] = {"columnwise": fp8_wgrad, "sum_dtype": sum_dtype}
        if wants_dgrad and torch.compiler.is_compiling():
            of_weight = for_weight, saved["weight"], saved.get("w_scale")
            g, g_t, grad_bias, w = dgrad_operands(
                ctx.grad_output, grad_output, *of_weight, **layouts
            )
        else:
            if wants_dgrad:  # while a collective may still fill the gradient
                w = for_weight.for_dgrad(saved["weight"], saved.get("w_scale"))
            g, g_t, grad_bias = ctx.grad_output(grad_output, rowwise=wants_dgrad, **layouts)
        if options.quantizers.observer is not None:
            options.quantizers.observer.backward(grad_output, g, g_t, saved.get("weight"), w)
        if g is not None:
            assert w is not None
            grad_input = scaled_matmul(  # (M, N) @ (K, N)^T
                g, w, input_dtype, fast_accum=recipe.dgrad.fast_accum, emulate=emulate
            ).view(ctx.input_shape)
        if g_t is not None:
            assert recipe.wgrad is not None
            if ctx.input_source is None:
                x_t = QuantizedTensor(saved["x"], saved["x_scale"], recipe.wgrad.b.granularity)
            else:
                x_t = ctx.input_source.columnwise(saved["x"], saved.get("x_scale"))
            a, b = (x_t, g_t) if for_weight.transposed else (g_t, x_t)  # (K, M), (N, M)
            tokens, fast_accum = math.prod(ctx.input_shape[:-1]), recipe.wgrad.fast_accum
            grad_weight = scaled_matmul(  # (N, M) @ (K, M)^T, over the tokens
                a, b, weight_dtype, tokens, fast_accum=fast_accum, emulate=emulate
            )
            inverse = saved.get("inverse")
            if inverse is not None:
                grad_weight.mul_(inverse[:, None] if for_weight.transposed else inverse)
        elif wants_wgrad:
            dense = matrix(grad_output)  # (M, N)
            x = saved["x"].to(dense.dtype)  # (M, K)
            product = x.t() @ dense if for_weight.transposed else dense.t() @ x
            grad_weight = cast(product, weight_dtype)
        return grad_input, grad_weight, grad_bias, None, None, *[None] * len(ctx.buffers)
