"""Cross entropy of an output layer, in chunks of tokens: a stand-in in plain torch.

Legend: T tokens, H features, V classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.autograd.function import once_differentiable

_CHUNK = 2048


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    num_items_in_batch: Tensor | float | None = None,
    precision: str = "bf16",
    chunk: int | None = None,
) -> Tensor:
    """Return ``cross_entropy(hidden @ weight.T + bias, labels)`` in float32.

    Args:
        hidden: (T, H).
        weight: (V, H), of the same dtype.
        labels: (T,) int64.
        bias: (V,) or None.
        class_weight: (V,) or None.
        ignore_index, reduction, label_smoothing: as in ``F.cross_entropy``.
        logit_scale: factor of the logits.
        softcap: bound ``s`` in ``s * tanh(logits / s)``, after the factor; None: none.
        num_items_in_batch: divisor of the sum, instead of the mean's.
        precision: ``bf16`` or ``fp8``.
        chunk: number of tokens in a chunk.
    """
    options = (ignore_index, reduction, label_smoothing, logit_scale, softcap, chunk or _CHUNK)
    if num_items_in_batch is not None:
        options = (options[0], "sum", *options[2:])
    loss: Tensor = _LossFunction.apply(hidden, weight, bias, labels, class_weight, options)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weight: Tensor | None,
        options: Any,
    ) -> Tensor:
        ignore_index, reduction, smoothing, scale, softcap, size = options
        losses: list[Tensor] = []
        wants = [*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2]]
        grads: list[Any] = [None, None, None]
        if wants[0]:
            grads[0] = torch.empty_like(hidden)
        if wants[1]:
            grads[1] = torch.zeros_like(weight, dtype=torch.float32)
        if wants[2]:
            grads[2] = torch.zeros_like(bias, dtype=torch.float32)
        valid = labels != ignore_index
        divisor: Any = 1.0
        if reduction == "mean":
            divisor = valid.sum()
            if class_weight is not None:
                divisor = class_weight[labels.clamp(min=0)][valid].float().sum()
        ctx.per_token = reduction == "none"
        assert not ctx.per_token or not any(wants), "the stand-in has no gradient for 'none'"
        for start in range(0, hidden.shape[0], size):
            rows = hidden.detach()[start : start + size]
            logits = F.linear(rows, weight.detach(), None if bias is None else bias.detach())
            logits.requires_grad_(any(wants))
            with torch.enable_grad():
                z = logits.float() * scale
                if softcap is not None:
                    z = torch.tanh(z / softcap) * softcap
                loss = F.cross_entropy(
                    z,
                    labels[start : start + size],
                    None if class_weight is None else class_weight.float(),
                    ignore_index=ignore_index,
                    reduction="none" if ctx.per_token else "sum",
                    label_smoothing=smoothing,
                )
            losses.append(loss.detach())
            if any(wants):
                (grad,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
                if wants[0]:
                    torch.mm(grad, weight.detach(), out=grads[0][start : start + size])
                if wants[1]:
                    grads[1] += grad.t().mm(rows).float()
                if wants[2]:
                    grads[2] += grad.sum(0).float()
        dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        ctx.grads = [
            None if g is None else (g / divisor).to(dtype)
            for g, dtype in zip(grads, dtypes, strict=True)
        ]
        ctx.name = "lm_head"
        if ctx.per_token:
            return torch.cat(losses) if losses else hidden.new_zeros(0, dtype=torch.float32)
        total = sum(losses, hidden.new_zeros((), dtype=torch.float32))
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else (g * grad).to(g.dtype) for g in ctx.grads]
        return *scaled, None, None, None
