"""A block of gated experts as one autograd function: six grouped GEMMs on FP8 payloads.

Forward::

    x8 = rows(x)                      (T, H), cast before its rows are gathered
    h  = x8[token] w1^T + b1          (R, 2I)
    a8 = rows(score * act(h))         (R, I)
    y  = combine(a8 w2^T)             (T, H)

Autograd saves x8, the gate and up halves of h in E4M3, and the order of rows: H + 2kI bytes per
token, plus scales. Backward also casts the gradient of y before its rows are gathered::

    da = g8[token] w2                 (R, I)
    a8, dh8, dscore                   from da, gate and up in one pass
    dw2 = g8[token]^T a8              (E, H, I)
    dx = combine(dh8 w1)              (T, H)
    dw1 = dh8^T x8[token]             (E, 2I, H)

The gradient of the router's scores needs no tensor (R, H), because it is the sum over I of da times
the activation. A token's score is multiplied in before the second GEMM. The second bias is weighted
separately, by a product of scores (T, E) and biases (E, H).

Legend: T tokens, k experts per token, R rows of all experts, E experts, H hidden, I expert width.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.autograd.current_pass import output_dtype, saves_nothing
from torch_fp8.autograd.function import Function, once_differentiable
from torch_fp8.kernels.arguments import GateBackwardInputs, GateForm
from torch_fp8.nn.bf16_forward import grouped_in_bf16
from torch_fp8.nn.grouped_linear_function import (
    GroupedOptions,
    cast_rows,
    multiply_rows,
    weight_grad_dtype,
    weight_gradient,
)
from torch_fp8.ops.expert_gate import (
    expert_gate_backward,
    expert_gate_quantize,
    gate_gradient,
    scored_activation,
)
from torch_fp8.ops.moe_rows import Route, combine_rows, gather_rows, spread_rows, transpose_groups
from torch_fp8.ops.quantize import QuantizedTensor, saved_stand_ins
from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.tensor.quantizer import matrix
from torch_fp8.tensor.saved_tensors import save_by_name, saved_by_name
from torch_fp8.tensor.weight_half import gradient_dtype

X, FIRST, SECOND, BIAS, SCORES = range(5)
"""Indices of the function's arguments that have gradients."""
_HALVES = ("gate", "gate_scale", "up", "up_scale")
_ONE = 0x38
"""E4M3 code of 1.0."""


class BlockOptions(NamedTuple):
    """The arguments of the function that are not tensors.

    Attributes:
        grouped: options of the GEMMs, with the qualified name of the module.
        form: gated activation.
        out_dtype: dtype of the GEMMs' results.
        grad_dtypes: dtypes of the gradients of both weights.
        with_gradients: whether a backward may follow.
    """

    grouped: GroupedOptions
    form: GateForm
    out_dtype: torch.dtype
    grad_dtypes: tuple[torch.dtype, torch.dtype]
    with_gradients: bool


def expert_block(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    route: Route,
    scores: Tensor,
    top_k_index: Tensor,
    grouped: GroupedOptions,
    form: GateForm,
) -> Tensor:
    """Compute gated experts, (T, H), in autocast's dtype if autocast is on, else in that of x.

    Args:
        x: tokens (T, H) in float32, bfloat16 or float16.
        weights: (E, 2I, H) and (E, H, I), with the last two dimensions swapped if transposed.
        biases: (E, 2I) and (E, H), or None.
        route: order of rows.
        scores: (T, k), weights that the router gives each token's experts.
        top_k_index: (T, k) integers, experts of each token; E or more is no expert of this rank.
        grouped: options of the GEMMs.
        form: gated activation.
    """
    first, second = weights
    grad_dtypes = gradient_dtype(first), gradient_dtype(second)
    options = BlockOptions(grouped, form, output_dtype(x), grad_dtypes, torch.is_grad_enabled())
    bias = None if biases is None else biases[0]
    y: Tensor = ExpertBlockFunction.apply(x, first, second, bias, scores, *route, options)
    if biases is None:
        return y
    experts = biases[1].shape[0]
    shares = scores.new_zeros(len(scores), experts + 1)  # (T, E + 1)
    shares = shares.scatter_add(1, top_k_index.long().clamp(max=experts), scores)[:, :experts]
    return (y + shares.to(y.dtype) @ biases[1].to(y.dtype)).to(y.dtype)


def _bias_gradient(
    g_t: QuantizedTensor, offs: Tensor, options: GroupedOptions, dtype: torch.dtype
) -> Tensor:
    """Sum the rows of each group, (E, N), by a GEMM with ones.

    Args:
        g_t: payload (N, R) with scales (E, N).
        offs: ends of the groups, (E,) int32.
        options: options of the GEMMs.
        dtype: dtype of the result.
    """
    # (16, R): 16 rows of ones, the least that a GEMM takes
    codes = g_t.qdata.new_full((GEMM_ALIGNMENT, g_t.qdata.shape[1]), _ONE, dtype=torch.uint8)
    scale = g_t.scale.new_ones(len(offs), GEMM_ALIGNMENT)
    ones = QuantizedTensor(codes.view(g_t.qdata.dtype), scale, g_t.granularity)
    sums = weight_gradient(ones, g_t, offs, dtype, options._replace(transposed=False))
    return sums[..., 0].contiguous()  # (E, N, 16) -> (E, N)


class ExpertBlockFunction(Function):
    """Gated experts with all their gradients; see the module docstring and `expert_block`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        scores: Tensor,
        slot: Tensor,
        token: Tensor,
        row: Tensor,
        offs: Tensor,
        options: BlockOptions,
    ) -> Tensor:
        grouped, dtype = options.grouped, options.out_dtype
        # (T, H): each token once, before its rows are gathered
        x8 = cast_rows(x, grouped.recipe.input)
        score = F.pad(scores.reshape(-1).float(), (0, 1))[slot]  # (T, k) -> (R,)
        in_bf16 = grouped.recipe.bf16_forward
        if in_bf16:
            h = grouped_in_bf16(spread_rows(matrix(x), token), first, offs, grouped).to(dtype)
        else:
            rows = gather_rows(x8, token)  # (R, H)
            h = multiply_rows(rows, first, offs, grouped, dtype, dgrad=False)  # (R, 2I)
            del rows
        saves = options.with_gradients and any(ctx.needs_input_grad)
        is_dropped = saves and saves_nothing()
        q, scale, *halves = expert_gate_quantize(
            h, score, offs, bias, options.form, saves and not is_dropped
        )
        if is_dropped:
            half = h[:, : h.shape[1] // 2]  # (R, I)
            halves = [*saved_stand_ins(half), *saved_stand_ins(half)]
        a8 = QuantizedTensor(q, scale, x8.granularity)  # (R, I)
        if grouped.observers:
            of_first, of_second = grouped.observers
            of_first.input(x, x8, offs, token)
            source = partial(scored_activation, h, score, offs, bias, options.form)
            of_second.input(source, a8, offs, None)
        if in_bf16:
            a = scored_activation(h, score, offs, bias, options.form)  # (R, I)
            rows = grouped_in_bf16(a, second, offs, grouped).to(dtype)  # (R, H)
        else:
            rows = multiply_rows(a8, second, offs, grouped, dtype, 1, dgrad=False)  # (R, H)
        y = combine_rows(rows, row)  # (T, H)
        saved: dict[str, Any] = {}
        if saves:
            saved = dict(zip(_HALVES, halves, strict=True))
            saved |= {"score": score, "token": token, "row": row, "offs": offs, "second": second}
            if ctx.needs_input_grad[X]:
                saved["first"] = first
            if ctx.needs_input_grad[FIRST]:
                saved |= {"x": x8.qdata, "x_scale": x8.scale}
        save_by_name(ctx, saved)
        ctx.options, ctx.name = options, grouped.name
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, first, second, bias, scores))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = saved_by_name(ctx)
        options: BlockOptions = ctx.options
        token, row, offs = saved["token"], saved["row"], saved["offs"]
        grouped, wants = options.grouped, ctx.needs_input_grad
        g8 = cast_rows(grad_output, grouped.recipe.grad_output)  # (T, H)
        grads: list[Tensor | None] = [None] * 10
        g = gather_rows(g8, token)  # (R, H)
        # (R, I)
        da = multiply_rows(g, saved["second"], offs, grouped, options.out_dtype, 1, dgrad=True)
        del g
        gate, up = ((saved[name], saved[f"{name}_scale"]) for name in ("gate", "up"))
        inputs = GateBackwardInputs(da, saved["score"], *gate, *up)
        q, scale, dh_q, dh_scale, dscore = expert_gate_backward(inputs, options.form)
        dh8 = QuantizedTensor(dh_q, dh_scale, g8.granularity)  # (R, 2I)
        if grouped.observers:
            of_first, of_second = grouped.observers
            of_first.grad_output(partial(gate_gradient, inputs, options.form), dh8, offs, None)
            of_second.grad_output(grad_output, g8, offs, token)
        del da, gate, up, inputs
        if wants[SECOND]:
            a_t = transpose_groups(QuantizedTensor(q, scale, g8.granularity), offs)  # (I, R)
            g_t = transpose_groups(g8, offs, token)  # (H, R)
            grads[SECOND] = weight_gradient(a_t, g_t, offs, _dtype(ctx, SECOND), grouped)
            del a_t, g_t
        if wants[X]:
            rows = multiply_rows(dh8, saved["first"], offs, grouped, ctx.dtypes[X], dgrad=True)
            grads[X] = combine_rows(rows, row)  # (R, H) -> (T, H)
            del rows
        if wants[FIRST] or wants[BIAS]:
            dh_t = transpose_groups(dh8, offs)  # (2I, R)
        if wants[FIRST]:
            x8 = QuantizedTensor(saved["x"], saved["x_scale"], g8.granularity)
            x_t = transpose_groups(x8, offs, token)  # (H, R)
            grads[FIRST] = weight_gradient(x_t, dh_t, offs, _dtype(ctx, FIRST), grouped)
        if wants[BIAS]:
            grads[BIAS] = _bias_gradient(dh_t, offs, grouped, ctx.dtypes[BIAS])
        if wants[SCORES]:
            grads[SCORES] = dscore[row].to(ctx.dtypes[SCORES])  # (R,) -> (T, k)
        return tuple(grads)


def _dtype(ctx: Any, i: int) -> torch.dtype:
    """Return the dtype of the gradient of a weight; see `weight_grad_dtype`."""
    return weight_grad_dtype(ctx, i, ctx.options.grad_dtypes[i - FIRST], ctx.dtypes[i])
