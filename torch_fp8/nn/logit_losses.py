"""The cross entropy of `LazyLogits`, computed from their hidden states.

Legend: H hidden features, V classes.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.nn.head_call import HeadCall
from torch_fp8.nn.lazy_logits import LazyLogits, Touched, has_other_node
from torch_fp8.nn.loss_head import linear_cross_entropy, linear_log_probs

LOG_SOFTMAX = math.inf
"""The mark of a log_softmax among the factors."""
_OBSERVED = 256
"""Number of tokens whose operands the monitor measures."""


def cross_entropy(
    func: Any,
    x: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return ``F.cross_entropy`` or ``F.nll_loss`` of x, or NotImplemented for unsupported calls.

    Args:
        func: one of the two functions; the other arguments are its own.
    """
    of = x.recorded
    dim = min(1, x.ndim - 1)
    usual = size_average is None and reduce is None and reduction in ("none", "mean", "sum")
    if not usual or of.class_dim != dim or isinstance(target, LazyLogits):
        return NotImplemented
    rows = of.hidden.movedim(dim, -1)  # (..., H)
    if target.dtype != torch.int64 or target.shape != rows.shape[:-1]:
        return NotImplemented  # probabilities of classes, or torch's error
    if weight is not None:
        fits = weight.shape == (x.shape[dim],) and (weight.dtype == x.dtype or autocasts(x))
        if not fits or weight.requires_grad:
            return NotImplemented
    if (func is F.nll_loss) != (LOG_SOFTMAX in of.scales):
        return NotImplemented
    scales = of.scales[:-1] if func is F.nll_loss else of.scales
    options = {"class_weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    options["label_smoothing"] = label_smoothing
    loss = _fused(linear_cross_entropy, x, scales, rows, target, options)
    if loss is NotImplemented:
        return NotImplemented
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    return loss if autocasts(x) else loss.to(x.dtype)


def log_probs(x: LazyLogits, target: Tensor, temperature: float = 1.0) -> Any:
    """Return ``log_softmax(x / temperature)`` at the targets, in float32, or NotImplemented.

    Args:
        x: logits (..., V).
        target: (...) int64 classes.
        temperature: divisor of the logits.
    """
    of = x.recorded
    rows = of.hidden
    fits = of.class_dim == x.ndim - 1 and target.shape == rows.shape[:-1]
    if of.call.is_read or not fits or target.dtype != torch.int64:
        return NotImplemented
    options = {"temperature": temperature}
    log_p = _fused(linear_log_probs, x, of.scales, rows, target, options)
    return log_p if log_p is NotImplemented else log_p.reshape(target.shape)


def _fused(
    compute: Any,
    x: LazyLogits,
    scales: tuple[float | None, ...],
    rows: Tensor,
    target: Tensor,
    options: dict[str, Any],
) -> Any:
    """Return a loss of x from hidden states, with the nodes of x, or NotImplemented.

    Args:
        compute: `linear_cross_entropy` or `linear_log_probs`; `options` are its own.
        scales: factors of the logits.
        rows: hidden states (..., H) of the targets (...).
    """
    of, call = x.recorded, x.recorded.call
    formula = None if LOG_SOFTMAX in scales else scale_and_softcap(scales)
    narrow = x.dtype not in (torch.float32, call.dtype)
    nodes = [] if torch.compiler.is_compiling() else _other_nodes(x)
    if formula is None or narrow or not all(map(_passes_gradients, nodes)):
        return NotImplemented
    if call.is_written and torch.is_grad_enabled():
        return NotImplemented
    call.is_fused = True
    call.note(0, "")
    weight, bias = call.parameters(of.requires_grad)
    form = {"logit_scale": formula[0], "softcap": formula[1], "precision": call.precision}
    with call.present(), torch.autocast(**call.autocast):
        tokens, labels = rows.reshape(-1, rows.shape[-1]), target.reshape(-1)
        if call.is_observed and torch.is_grad_enabled():
            _show(call, tokens, labels, options.get("ignore_index", -100))
        loss = compute(tokens, weight, labels, bias, **form, **options)
    for hook in call.begins if loss.requires_grad else ():
        loss.register_hook(hook)
    for logits in nodes if loss.requires_grad else ():
        loss = Touched.apply(loss, logits)
    return loss


def _show(call: HeadCall, tokens: Tensor, labels: Tensor, ignore_index: int) -> None:
    """Let the monitor see the operands of a few tokens, for which the layer computes logits."""
    some = slice(None, None, max(1, -(-len(tokens) // _OBSERVED)))
    x = tokens[some].detach().requires_grad_()
    logits = call.linear(x, call.weight, call.bias).float()
    loss = F.cross_entropy(logits, labels[some], ignore_index=ignore_index, reduction="sum")
    torch.autograd.grad(loss, x)


def autocasts(x: LazyLogits) -> bool:
    """Return whether autocast runs a loss in float32 now."""
    return torch.is_autocast_enabled(x.device.type)


def _passes_gradients(x: LazyLogits) -> bool:
    """Return whether DDP's function returned these logits, whose backward passes gradients on."""
    with torch._C.DisableTorchFunctionSubclass():
        return type(x.grad_fn).__name__ == "_DDPSinkBackward"


def _other_nodes(x: LazyLogits) -> list[LazyLogits]:
    """Return the logits between `x` and the layer that other autograd functions returned."""
    logits: LazyLogits | None = x
    nodes = []
    while logits is not None:
        if has_other_node(logits):
            nodes.append(logits)
        logits = logits.recorded.parent
    return nodes


def scale_and_softcap(scales: tuple[float | None, ...]) -> tuple[float, float | None] | None:
    """Return (f, s) for ``s * tanh(f * logits / s)``, (f, None) for ``f * logits``, else None.

    Args:
        scales: factors in the order in which they were applied, and None for a tanh.
    """
    if None not in scales:
        return math.prod([s for s in scales if s is not None]), None
    at = scales.index(None)
    before, after = scales[:at], scales[at + 1 :]
    if None in after:
        return None
    softcap = math.prod([s for s in after if s is not None])
    factor = math.prod([s for s in before if s is not None]) * softcap
    return (factor, softcap) if softcap > 0 else None
