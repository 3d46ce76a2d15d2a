"""The three grouped GEMMs of an expert layer on FP8 payloads, as an autograd function.

``y = x w_e^T`` for the rows of each expert e, and in backward ``dx = g w_e`` and ``dw_e = g^T x``.
Tokens are cast before they are gathered: each one only once, however many experts process it.
Autograd saves this payload, 1 byte per element of (T, K), and the weight itself. All scales are
powers of two, one per row, so that wgrad can read the same payloads, transposed
(`torch_fp8.ops.moe_rows.transpose_groups`).

Legend: T tokens, R rows of all experts, E experts, K in, N out.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.autograd.current_pass import is_traced, output_dtype
from torch_fp8.autograd.function import Function, is_returned, once_differentiable
from torch_fp8.nn.bf16_forward import grouped_in_bf16
from torch_fp8.nn.expert_storage import transposed_stacked
from torch_fp8.ops.hardware import is_capturing
from torch_fp8.ops.moe_rows import Route, combine_rows, gather_rows, spread_rows, transpose_groups
from torch_fp8.ops.quantize import QuantizedTensor, quantize_stacked
from torch_fp8.ops.scaled_grouped_mm import scaled_grouped_matmul
from torch_fp8.ops.scaled_mm import cast
from torch_fp8.quantization.recipe import CastSpec, Recipe
from torch_fp8.quantization.scaling import OF_TENSOR
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.halves import PayloadCast
from torch_fp8.tensor.lazy_quantized import plain
from torch_fp8.tensor.payload_cache import PayloadCache
from torch_fp8.tensor.quantizer import Quantizer, matrix
from torch_fp8.tensor.saved_tensors import save_by_name, saved_by_name
from torch_fp8.tensor.split_weight import SplitWeight, stored
from torch_fp8.tensor.weight_half import gradient_dtype


class GroupedOptions(NamedTuple):
    """The arguments of the function that are not tensors.

    Attributes:
        name: qualified name of the weight, for errors.
        recipe: casts and options of the GEMMs.
        transposed: whether the weight is stored as (E, K, N).
        emulate: whether the GEMMs run through the reference path.
        observers: monitors of the weights, see `torch_fp8.nn.expert_storage.ExpertsFP8`.
        caches: caches of the weights' payloads, in the order of `observers`.
        trains: whether the forward belongs to training.
    """

    name: str
    recipe: Recipe
    transposed: bool
    emulate: bool
    observers: tuple[Any, ...] = ()
    caches: tuple[PayloadCache, ...] = ()
    trains: bool = True


def grouped_linear(
    x: Tensor, weight: Tensor, offs: Tensor, route: Route | None, options: GroupedOptions
) -> Tensor:
    """Compute ``y = x w_e^T`` (R, N) for the rows of each expert; rows behind the groups are zero.

    y has autocast's dtype if autocast is on, else that of x.

    Args:
        x: (T, K), if `route` gathers its tokens; else (R, K).
        weight: (E, N, K), or (E, K, N) if transposed.
        offs: ends of the groups (E,) int32, see `Route`.
        route: map from rows to tokens, or None if x already has one row per token and expert.
        options: options of the GEMMs.
    """
    token, row = (None, None) if route is None else (route.token, route.row)
    return GroupedLinearFunction.apply(
        x, weight, offs, token, row, output_dtype(x), gradient_dtype(weight), options
    )


def cast_rows(x: Tensor, spec: CastSpec) -> QuantizedTensor:
    """Cast x (..., K) as rows (R, K), with a scale for each row."""
    rows, _, _ = Quantizer(spec, OF_TENSOR)(x, rowwise=True, columnwise=False)
    assert rows is not None
    return rows


def weight_operand(
    weight: Tensor,
    options: GroupedOptions,
    place: int = 0,
    after: Tensor | None = None,
    *,
    dgrad: bool,
) -> QuantizedTensor:
    """Return the payload of a weight that fprop multiplies by, or for `dgrad` that of backward.

    Args:
        weight: weights (E, R, C) in their stored layout.
        options: options of the GEMMs.
        place: index of the weight in `options.caches`.
        after: see `torch_fp8.kernels.arguments.CastOptions`.
        dgrad: whether this is for backward.
    """
    flip = options.transposed != dgrad
    if isinstance(weight, SplitWeight):
        payload = weight.halves.current_payload(PayloadCast(options.recipe.weight, flip))
        if payload is not None:
            return payload
    cast_now = partial(cast_weight, weight, options, after, flip=flip)
    cache = options.caches[place] if options.caches else None
    if cache is None or options.trains or is_capturing(weight.device):
        if cache is not None:
            cache.forget()  # before a new payload takes memory
        return cast_now()
    return cache.evaluation_row(cache.version_of(weight), cast_now, weight.device)


def cast_weight(
    weight: Tensor, options: GroupedOptions, after: Tensor | None = None, *, flip: bool
) -> QuantizedTensor:
    """Cast a weight (E, R, C), or with `flip` its transpose (E, C, R), with one scale per row."""
    spec = options.recipe.weight
    if isinstance(weight, Float8FrozenWeight):
        payload = weight.payload.quantized
        return transposed_stacked(payload, spec, after) if flip else payload
    if isinstance(weight, QuantizableTensor):  # gathered in FP8
        return QuantizedTensor(*weight.stacked_payload(flip), spec.granularity)
    return cast_stacked(stored(weight), spec, flip, after)


def cast_stacked(
    values: Tensor, spec: CastSpec, flip: bool, after: Tensor | None = None
) -> QuantizedTensor:
    """Cast plain weights (E, R, C), or with `flip` their transposes (E, C, R), rowwise.

    Args:
        values: weights in float32, bfloat16 or float16.
        spec: cast with one scale per row.
        flip: whether to transpose.
        after: see `torch_fp8.kernels.arguments.CastOptions`.
    """
    return quantize_stacked(values.transpose(1, 2) if flip else values, spec, after)


def multiply_rows(
    x: QuantizedTensor,
    weight: Tensor,
    offs: Tensor,
    options: GroupedOptions,
    dtype: torch.dtype,
    place: int = 0,
    *,
    dgrad: bool,
) -> Tensor:
    """Multiply rows (R, K) by the weights of their experts, or for `dgrad` by the transposes.

    Args:
        x: payload of the rows.
        weight: weights in their stored layout.
        offs: ends of the groups (E,) int32.
        options: options of the GEMMs.
        dtype: dtype of the result.
        place: index of the weight in `options.caches` and `options.observers`.
        dgrad: whether this is the product in backward.
    """
    gemm = options.recipe.dgrad if dgrad else options.recipe.fprop
    after = x.scale if dgrad and is_traced() else None
    weight8 = weight_operand(weight, options, place, after, dgrad=dgrad)
    for observer in options.observers[place : place + 1]:
        observer.weight(weight, weight8, options.transposed != dgrad)
    precise = {"fast_accum": gemm.fast_accum, "emulate": options.emulate}
    return scaled_grouped_matmul(x, weight8, offs, "rows", dtype, **precise)


class GroupedLinearFunction(Function):
    """``y = x w_e^T`` by expert on FP8 payloads, with dgrad and wgrad; see `grouped_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offs: Tensor,
        token: Tensor | None,
        row: Tensor | None,
        out_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        options: GroupedOptions,
    ) -> Tensor:
        wants_dgrad, wants_wgrad = ctx.needs_input_grad[:2]
        recipe = options.recipe
        payload = cast_rows(x, recipe.input)  # (T, K)
        for observer in options.observers:
            observer.input(x, payload, offs, token)
        if recipe.bf16_forward:
            dense = matrix(x) if token is None else spread_rows(matrix(x), token)  # (R, K)
            y = grouped_in_bf16(dense, weight, offs, options).to(out_dtype)
        else:
            rows = payload if token is None else gather_rows(payload, token)  # (R, K)
            y = multiply_rows(rows, weight, offs, options, out_dtype, dgrad=False)  # (R, N)
        saved: dict[str, Tensor | None] = {"offs": offs, "token": token, "row": row}
        if wants_dgrad:
            saved["weight"] = weight
        if wants_wgrad and recipe.wgrad is None:
            saved["x"] = matrix(x).to(out_dtype)
        elif wants_wgrad:
            saved["x"], saved["x_scale"] = payload.qdata, payload.scale
        save_by_name(ctx, saved)
        ctx.options, ctx.name = options, options.name
        ctx.dtypes = x.dtype, grad_dtype, weight.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = saved_by_name(ctx)
        options: GroupedOptions = ctx.options
        recipe, offs = options.recipe, saved["offs"]
        wants_dgrad, wants_wgrad = ctx.needs_input_grad[:2]
        fp8_wgrad = wants_wgrad and recipe.wgrad is not None
        input_dtype, *of_weight = ctx.dtypes
        weight_dtype = weight_grad_dtype(ctx, 1, *of_weight)
        grad_input = grad_weight = g = None
        if wants_dgrad or fp8_wgrad:
            g = cast_rows(grad_output, recipe.grad_output)  # (R, N)
            for observer in options.observers:
                observer.grad_output(grad_output, g, offs, None)
        if wants_dgrad:
            assert g is not None
            # (R, K)
            grad_input = multiply_rows(g, saved["weight"], offs, options, input_dtype, dgrad=True)
            if "row" in saved:
                grad_input = combine_rows(grad_input, saved["row"])  # (R, K) -> (T, K)
        if fp8_wgrad:
            assert g is not None
            x8 = QuantizedTensor(saved["x"], saved["x_scale"], g.granularity)
            x_t = transpose_groups(x8, offs, saved.get("token"))  # (T, K) -> (K, R)
            g_t = transpose_groups(g, offs)  # (R, N) -> (N, R)
            grad_weight = weight_gradient(x_t, g_t, offs, weight_dtype, options)
        elif wants_wgrad:
            x, dense = saved["x"], plain(grad_output)
            x = x if "token" not in saved else spread_rows(x, saved["token"])  # (R, K)
            a, b = (x, dense) if options.transposed else (dense, x)
            # (N, R) @ (R, K), or with its operands exchanged
            product = F.grouped_mm(a.to(dense.dtype).t(), b.to(dense.dtype), offs=offs)
            grad_weight = cast(product, weight_dtype)
        return grad_input, grad_weight, None, None, None, None, None, None


def weight_grad_dtype(ctx: Any, i: int, dtype: torch.dtype, own_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight's gradient in this backward.

    Args:
        ctx: context of the autograd function.
        i: index of the weight among its arguments.
        dtype: dtype in which gradients are accumulated.
        own_dtype: dtype of the weight, which ``autograd.grad`` has to return.
    """
    return own_dtype if dtype != own_dtype and is_returned(ctx, i) else dtype


def weight_gradient(
    x_t: QuantizedTensor,
    g_t: QuantizedTensor,
    offs: Tensor,
    dtype: torch.dtype,
    options: GroupedOptions,
) -> Tensor:
    """Compute the gradient (E, N, K) of a weight, or (E, K, N) if transposed: ``dw_e = g^T x``.

    Args:
        x_t: payload (K, R) with scales (E, K).
        g_t: payload (N, R) with scales (E, N).
        offs: ends of the groups (E,) int32.
        dtype: dtype of the result.
        options: options of the GEMMs.
    """
    assert options.recipe.wgrad is not None
    return scaled_grouped_matmul(
        *((x_t, g_t) if options.transposed else (g_t, x_t)),
        offs,
        "sums",
        dtype,
        fast_accum=options.recipe.wgrad.fast_accum,
        emulate=options.emulate,
    )


class RouteFunction(Function):
    """Copy each token to its rows, or sum the rows of each token; backward does the other.

    torch's own backward of indexing would accumulate, which is not needed here: a row has only one
    token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, row: Tensor, spreads: bool) -> Tensor:
        ctx.spreads = spreads
        ctx.save_for_backward(row if spreads else token)
        return spread_rows(x, token) if spreads else combine_rows(x, row)  # (T, K) and (R, K)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        moved = combine_rows(grad, index) if ctx.spreads else spread_rows(grad, index)
        return moved, None, None, None
