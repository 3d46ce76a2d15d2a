"""The gated activation of experts, times the router's score, cast to FP8 by rows in one pass.

``a = score * act(gate, up)`` is the input of the second GEMM. Backward gets the gradient of a, and
gate and up in E4M3, saved as in `torch_fp8.ops.swiglu`. In one pass it recomputes the payload of a
for the weight gradient, and computes the payload of the gradient of gate and up, and the gradient
of the scores.

Arithmetic is float32; a and the gradients are rounded once, to the dtype of the GEMMs' results, and
then cast. References on the CPU and kernels on CUDA differ only in the last bits of exp, as
SwiGLU's do.

Legend: R rows of all experts, E experts, I expert width.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import EXPERT_ROWS, GateBackwardInputs, GateForm
from torch_fp8.ops.moe_rows import group_of_rows
from torch_fp8.ops.quantize import quantize_2d, save_inputs, saved_values
from torch_fp8.ops.registry import operator

_BEYOND, _CUT = 1.25, 1.125
"""Multiples of a limit: the value saved for values just beyond it, and the threshold by which
backward distinguishes these from values within, which E4M3 may have rounded up by a sixteenth.
"""


def split_gate(h: Tensor, form: GateForm) -> tuple[Tensor, Tensor]:
    """Return gate and up, (R, I) each, from h (R, 2I)."""
    if form.interleaved:
        return h[:, ::2], h[:, 1::2]  # strides (2I, 2)
    gate, up = h.chunk(2, dim=1)
    return gate, up


def join_gate(gate: Tensor, up: Tensor, form: GateForm) -> Tensor:
    """Return h (R, 2I) from gate and up, (R, I) each."""
    if form.interleaved:
        return torch.stack([gate, up], 2).flatten(1)  # (R, I, 2) -> (R, 2I)
    return torch.cat([gate, up], 1)


def sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid of float32; tests replace it by a GPU's."""
    return x.sigmoid()


def activation(gate: Tensor, up: Tensor, form: GateForm) -> Tensor:
    """Compute the activation of float32 gate and up."""
    if form.clamped:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit) + 1
        return gate * sigmoid(gate * form.alpha) * up
    return gate * sigmoid(gate) * up


def _saved_halves(gate: Tensor, up: Tensor, form: GateForm) -> tuple[Tensor, Tensor]:
    """Return gate and up as saved, so that E4M3 shows whether a value is beyond a limit."""
    if not form.clamped:
        return gate, up
    beyond = form.limit * _BEYOND
    gate = torch.where(gate > form.limit, gate.clamp(min=beyond), gate)
    up = torch.where(up > form.limit, up.clamp(min=beyond), up)
    return gate, torch.where(up < -form.limit, up.clamp(max=-beyond), up)


def activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, form: GateForm
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up from the activation's gradient, all in float32."""
    if not form.clamped:
        sig = sigmoid(gate)
        silu = gate * sig
        return grad * up * (sig + silu * (1 - sig)), grad * silu
    limit = form.limit * _CUT
    inside, within = ~(gate > limit), ~(up.abs() > limit)
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit) + 1
    sig = sigmoid(gate * form.alpha)
    silu = gate * sig
    slope = sig + silu * form.alpha * (1 - sig)
    dgate, dup = grad * up * slope, grad * silu
    return dgate.where(inside | dgate.isnan(), 0.0), dup.where(within | dup.isnan(), 0.0)


def _quantized(x: Tensor) -> tuple[Tensor | None, ...]:
    """Return x in E4M3 with a power-of-two scale for each row."""
    return quantize_2d.reference(x, EXPERT_ROWS)[:2]


def _quantize_fake(
    h: Tensor, score: Tensor, offs: Tensor, bias: Tensor | None, form: GateForm, save: bool
) -> tuple[Tensor | None, ...]:
    half = h.new_empty((h.shape[0], h.shape[1] // 2))
    payload = EXPERT_ROWS.new_layouts(half)[:2]
    return (*payload, *save_inputs(save, half, half))


@operator(_quantize_fake, results=6)
def expert_gate_quantize(
    h: Tensor, score: Tensor, offs: Tensor, bias: Tensor | None, form: GateForm, save: bool
) -> tuple[Tensor | None, ...]:
    """The operator ``torch_fp8::expert_gate_quantize``: cast the activation times the score.

    Args:
        h: (R, 2I) float32, bfloat16 or float16, contiguous: the result of the first GEMM.
        score: (R,) float32, 0 for a row of padding.
        offs: (E,) int32, see `torch_fp8.ops.moe_rows.Route`.
        bias: (E, 2I), any floating dtype, added to h, after which h is rounded again; or None.
        form: the order of gate and up, and their limits.
        save: whether to return gate and up for backward.
    Returns:
        ``(q, s, gate_q, gate_s, up_q, up_s)``: the payload (R, I) E4M3 with power-of-two scales (R,
        1); gate and up in E4M3 (R, I) with scales (R, ceil(I / 128)), None unless `save`.
    """
    gate, up = _biased_halves(h, offs, bias, form)
    halves = _saved_halves(gate, up, form)
    a = _scored(gate, up, score, form)
    return (*_quantized(a), *save_inputs(save, *halves))


def scored_activation(
    h: Tensor, score: Tensor, offs: Tensor, bias: Tensor | None, form: GateForm
) -> Tensor:
    """Return the tensor that `expert_gate_quantize` casts, (R, I); same arguments."""
    return _scored(*_biased_halves(h, offs, bias, form), score, form)


def _biased_halves(
    h: Tensor, offs: Tensor, bias: Tensor | None, form: GateForm
) -> tuple[Tensor, Tensor]:
    if bias is not None:
        group = group_of_rows(offs, h.shape[0]).clamp(max=offs.shape[0] - 1)
        h = (h.float() + bias.float()[group]).to(h.dtype)  # (R, 2I) + (E, 2I) by row
    return split_gate(h, form)


def _scored(gate: Tensor, up: Tensor, score: Tensor, form: GateForm) -> Tensor:
    return (activation(gate.float(), up.float(), form) * score[:, None]).to(gate.dtype)


def _backward_fake(inputs: GateBackwardInputs, form: GateForm) -> tuple[Tensor | None, ...]:
    grad, cols = inputs.grad, inputs.grad.shape[1]
    dscore = grad.new_empty(grad.shape[0], dtype=torch.float32)
    a, dh = EXPERT_ROWS.new_layouts(grad), EXPERT_ROWS.new_layouts(grad, 2 * cols)
    return *a[:2], *dh[:2], dscore


@operator(_backward_fake, results=5)
def expert_gate_backward(inputs: GateBackwardInputs, form: GateForm) -> tuple[Tensor, ...]:
    """The operator ``torch_fp8::expert_gate_backward``: all that backward computes.

    Args:
        inputs: see `GateBackwardInputs`.
        form: see `expert_gate_quantize`.
    Returns:
        ``(q, s, dh_q, dh_s, dscore)``: the payload of a, (R, I) with scales (R, 1); the payload of
        the gradient of h, (R, 2I) in the order of h with scales (R, 1); the gradient of the scores,
        (R,) float32.
    """
    grad, score, gate, gate_scale, up, up_scale = inputs
    gate, up = saved_values(gate, gate_scale), saved_values(up, up_scale)
    g, act = grad.float(), activation(gate, up, form)
    dscore = (g * act).sum(1)  # (R, I) -> (R,)
    a = _quantized((act * score[:, None]).to(grad.dtype))
    return *a, *_quantized(gate_gradient(inputs, form)), dscore


def gate_gradient(inputs: GateBackwardInputs, form: GateForm) -> Tensor:
    """Return the gradient that `expert_gate_backward` casts, (R, 2I); same arguments."""
    grad, score, gate, gate_scale, up, up_scale = inputs
    gate, up = saved_values(gate, gate_scale), saved_values(up, up_scale)
    dgate, dup = activation_backward(grad.float() * score[:, None], gate, up, form)
    return join_gate(dgate.to(grad.dtype), dup.to(grad.dtype), form)
