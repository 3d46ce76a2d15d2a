"""The autograd functions of an `torch_fp8.nn.input_group.InputGroup`, with its dgrad and wgrad.

Legend: M tokens, K in, N out.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import stand_in
from torch_fp8.autograd.function import (
    differentiable_by,
    is_asked_for,
    is_returned,
    refuse_derivatives,
)
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.nn.linear_function import LinearOptions
from torch_fp8.nn.saved_tensors import save_by_name, saved_by_name
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts
from torch_fp8.ops.scaled_mm import cast, scaled_matmul
from torch_fp8.tensor.lazy_quantized import plain
from torch_fp8.tensor.quantizer import WeightQuantizer, matrix, quantize_input
from torch_fp8.tensor.split_weight import stored
from torch_fp8.tensor.weight_half import gradient_dtype

_split: Any = torch.ops.aten.unsafe_split_with_sizes.default


class Members(NamedTuple):
    """The arguments of `Join` that are not tensors.

    Attributes:
        options: options of the first layer that was called.
        sizes: output features of each layer.
        scales: scale of each weight's payload, or None if the layer was not called.
        layers: all layers; none in a graph.
    """

    options: LinearOptions
    sizes: list[int]
    scales: list[Tensor | None]
    layers: tuple[Any, ...] = ()


class Member(torch.autograd.Function):
    """Return the output of a layer, whose gradient goes to `Join`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, compute: Callable[[], Tensor], reads: Any) -> Tensor:
        ctx.reads = reads  # for the members that are called later
        return compute()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return grad_output, None, None


def _differentiable(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients of input and biases in high precision, by torch's operators."""
    num = len(grads)
    present = [i for i, grad in enumerate(grads) if grad is not None]
    if any(is_asked_for(ctx, 1 + i) for i in present):
        refuse_derivatives(ctx)
    saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
    grad_input, grad_biases = None, [None] * num
    for i in present:
        grad = plain(grads[i])
        product = grad @ saved[f"weight{i}"].to(grad.dtype)  # (..., N) @ (N, K)
        grad_input = product if grad_input is None else grad_input + product
        if ctx.bias_dtypes[i] is not None:
            grad_biases[i] = matrix(grad).sum(0, dtype=torch.float32).to(ctx.bias_dtypes[i])
    if grad_input is not None:
        grad_input = grad_input.to(ctx.members.options.dtype).view(ctx.input_shape)
    return grad_input, None, None, *[None] * num, *grad_biases


class Join(torch.autograd.Function):
    """Map the input (..., K), weights (N, K) and biases to a stand-in (..., N) for each output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: torch.Size, members: Members, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        options, num = members.options, len(members.sizes)
        weights, biases = tensors[:num], tensors[num:]
        needs: dict[str, Any] = {"wgrad": True, "fp8_wgrad": options.recipe.wgrad is not None}
        payloads = quantize_input(options.quantizers.input, x, **needs, dtype=options.out_dtype)
        saved = {f"weight{i}": weight for i, weight in enumerate(weights)}
        save_by_name(ctx, {**saved, "x": payloads.qdata, "x_scale": payloads.scale})
        ctx.set_materialize_grads(False)
        ctx.members, ctx.name, ctx.input_shape = members, options.name, shape
        ctx.dtypes = [(gradient_dtype(w), w.dtype) for w in weights if w is not None]
        wanted = ctx.needs_input_grad[3 + num :]
        ctx.bias_dtypes = [
            b.dtype if b is not None and wants else None
            for b, wants in zip(biases, wanted, strict=True)
        ]
        return tuple(
            stand_in((*shape[:-1], size), options.out_dtype, payloads.qdata)
            for size in members.sizes
        )

    @staticmethod
    @differentiable_by(_differentiable)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num, members = len(grads), ctx.members
        present = [i for i, grad in enumerate(grads) if grad is not None]
        grad_weights: list[Tensor | None] = [None] * num
        grad_biases: list[Tensor | None] = [None] * num
        if not present:
            return None, None, None, *grad_weights, *grad_biases
        saved, options = saved_by_name(ctx), members.options
        recipe, emulate = options.recipe, options.emulate
        sizes = [members.sizes[i] for i in present]
        weights = [saved[f"weight{i}"] for i in present]
        outputs = [matrix(plain(grads[i])) for i in present]
        grad = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        has_bias = any(ctx.bias_dtypes[i] is not None for i in present)
        g, g_t, sums = options.quantizers.grad_output(  # (M, N) along N, (N, M) along M, (N,)
            grad,
            rowwise=True,
            columnwise=recipe.wgrad is not None,
            sum_dtype=torch.float32 if has_bias else None,
        )
        assert g is not None
        scales = [members.scales[i] for i in present]
        w = _side_by_side(weights, options.quantizers.weight, scales)
        grad_input = scaled_matmul(  # (M, N) @ (K, N)^T
            g, w, options.dtype, fast_accum=recipe.dgrad.fast_accum, emulate=emulate
        ).view(ctx.input_shape)
        dtypes = [
            whole if stored != whole and is_returned(ctx, 1 + i) else stored
            for i, (stored, whole) in ((i, ctx.dtypes[i]) for i in present)
        ]
        out_dtype = dtypes[0] if len(set(dtypes)) == 1 else torch.float32
        if g_t is not None and recipe.wgrad is not None:
            x_t = QuantizedTensor(saved["x"], saved["x_scale"], recipe.wgrad.b.granularity)
            tokens, fast_accum = math.prod(ctx.input_shape[:-1]), recipe.wgrad.fast_accum
            rows = scaled_matmul(  # (N, M) @ (K, M)^T, over the tokens
                g_t, x_t, out_dtype, tokens, fast_accum=fast_accum, emulate=emulate
            )
        else:
            rows = cast(grad.t() @ saved["x"].to(grad.dtype), out_dtype)
        _observe(members, present, grads, g, g_t, weights, w)
        # Not views, because the gradients are the users' to write to: (N1 + N2 + ..., K) -> (N, K)
        for i, dtype, part in zip(present, dtypes, _split(rows, sizes), strict=True):
            grad_weights[i] = cast(part, dtype)
        if sums is not None:
            for i, part in zip(present, _split(sums, sizes), strict=True):
                dtype = ctx.bias_dtypes[i]
                grad_biases[i] = None if dtype is None else cast(part, dtype)
        return grad_input, None, None, *grad_weights, *grad_biases


def _side_by_side(
    weights: Sequence[Tensor],
    quantizer: WeightQuantizer,
    scales: Sequence[Tensor | None],
) -> QuantizedTensor:
    """Return weights (N, K) as one payload (K, N1 + N2 + ...), quantized along N.

    Args:
        weights: weights that forward used.
        quantizer: quantizer of the weights.
        scales: () scale of each weight in fprop.
    """
    spec = quantizer.quantizer.spec
    known = [s for s in scales if s is not None]
    scale = known[0] if len(known) == 1 else torch.stack(known).amax()
    options = CastOptions.of(spec, scale, rowwise=False, columnwise=True)
    payloads: list[Any] = [quantize_layouts(stored(w), options)[1] for w in weights]
    if len(payloads) == 1:
        alone: QuantizedTensor = payloads[0]
        return alone
    codes = torch.cat([payload.qdata.view(torch.uint8) for payload in payloads], 1)
    return QuantizedTensor(codes.view(payloads[0].qdata.dtype), scale, spec.granularity)


def _observe(
    members: Members,
    present: Sequence[int],
    grads: Sequence[Tensor | None],
    g: QuantizedTensor,
    g_t: QuantizedTensor | None,
    weights: Sequence[Tensor],
    w: QuantizedTensor,
) -> None:
    """Show the monitor of each layer its part of the operands of backward."""
    start = 0
    if not members.layers:
        return
    for i, weight in zip(present, weights, strict=True):
        layer, end = members.layers[i], start + members.sizes[i]
        if layer.fp8.observer is not None:
            row, w_col = (x._replace(qdata=x.qdata[:, start:end]) for x in (g, w))
            col = None if g_t is None else g_t._replace(qdata=g_t.qdata[start:end])
            layer.fp8.observer.backward(grads[i], row, col, weight, w_col)
        start = end
