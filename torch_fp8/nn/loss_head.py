"""An output layer and its cross entropy, or log-probabilities, without logits in memory.

`linear_cross_entropy` computes the loss and all gradients in forward, a chunk of tokens at a time
(`torch_fp8.ops.linear_cross_entropy`); backward multiplies them by the gradient of the loss. Losses
of tokens (``reduction="none"``), log-probabilities and entropies know their gradients only in
backward: they save one float a token (two with entropies) and compute each chunk's logits again, a
fourth product.

Numerics are torch's: the product is rounded to the dtype of hidden states or autocast, softmax and
loss are float32. The reciprocal of the number of tokens is split into a power of two, which is
exact and multiplies last, and a factor in [0.5, 1), which multiplies before the gradient of the
logits is rounded, as in torch. So no gradient underflows in float16 or FP8.

Legend: T tokens, H features, V classes.
"""

import warnings
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.autograd import current_pass
from torch_fp8.autograd.current_pass import autocast_dtype, in_high_precision, output_dtype
from torch_fp8.kernels.loss_arguments import LogitForm, LossTerms
from torch_fp8.nn.loss_function import loss_in_graph, payload_of, token_losses_in_graph
from torch_fp8.ops.hardware import check_device
from torch_fp8.ops.linear_cross_entropy import HeadOptions
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.lazy_quantized import plain
from torch_fp8.tensor.split_weight import SplitWeight
from torch_fp8.tensor.weight_half import half

Precision = Literal["bf16", "fp8"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_LABEL = -(2**62)
"""An `ignore_index` that no label equals."""


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
    num_items_in_batch: int | Tensor | None = None,
    precision: str = "bf16",
    chunk: int | None = None,
) -> Tensor:
    """Compute ``F.cross_entropy(form(hidden weight^T + bias).float(), labels)`` in chunks.

    ``form(x) = softcap * tanh(logit_scale * x / softcap)``. At most one chunk of tokens has logits
    at a time. For labels that are probabilities, and for float64, torch computes the loss from all
    logits, with a warning; so it does, without one, within `torch_fp8.high_precision`.

    Args:
        hidden: (..., H) float32, bfloat16 or float16.
        weight: (V, H). The products read its BF16 half if it is stored in two halves, and its bytes
            if it is frozen in FP8.
        labels: (...) int64, classes or `ignore_index`.
        bias: (V,) or None.
        class_weight: (V,) or None, factors of classes as in ``F.cross_entropy``.
        ignore_index: label of tokens without loss.
        reduction: ``"mean"`` over the tokens (by class weight), ``"sum"``, or ``"none"``.
        label_smoothing: share of the uniform distribution in the targets.
        logit_scale: factor of the product.
        softcap: bound of the logits, or None.
        num_items_in_batch: divisor of the sum instead of this batch's number of tokens.
        precision: ``"bf16"``, the products in the dtype of `hidden` or of autocast; ``"fp8"``, all
            three in FP8.
        chunk: tokens that have logits at the same time, or None for 2,048 to 4,096, by memory.
    Returns:
        () float32, or (...) float32 for ``"none"``.
    Raises:
        ValueError: the arguments contradict each other, or the device has no FP8.
        IndexError, RuntimeError: what ``F.linear`` and ``F.cross_entropy`` raise for these tensors.
    """
    if not torch.compiler.is_compiling():
        check_arguments(linear_cross_entropy, locals())
    hidden = plain(hidden)
    form = LogitForm(logit_scale, softcap or 0.0, 1.0)
    options = _options(hidden, precision, chunk)._replace(ignore_index=ignore_index)
    if num_items_in_batch is not None and reduction != "mean":
        raise ValueError(
            f"num_items_in_batch replaces the number of tokens of a mean, got {reduction=}; leave "
            "one of them out"
        )
    reason = _reason_for_stock(hidden, weight, labels, bias, options)
    if class_weight is not None and class_weight.shape != weight.shape[:1]:
        reason = ""
    if reduction not in ("mean", "sum", "none") or not 0 <= label_smoothing <= 1:
        reason = ""
    if reason is not None:
        logits = _stock_logits(hidden, weight, bias, form, reason)
        if not labels.is_floating_point():
            labels = labels.reshape(-1)
        settings: dict[str, Any] = {"ignore_index": ignore_index, "weight": class_weight}
        divides = num_items_in_batch is not None
        loss = F.cross_entropy(
            logits,
            labels.reshape(-1, labels.shape[-1]) if labels.is_floating_point() else labels,
            **settings,
            label_smoothing=label_smoothing,
            reduction="sum" if divides else reduction,
        )
        if reduction == "none":
            return loss.view(hidden.shape[:-1])
        return loss / num_items_in_batch if divides else loss
    shape, labels = labels.shape, labels.reshape(-1).to(torch.int64)
    valid = labels != ignore_index
    classes: int = weight.shape[0]
    factor, total, smooth = valid.to(torch.float32), float(classes), None
    if class_weight is not None:
        class_weight = class_weight.detach().to(torch.float32)
        inside = valid & (labels >= 0) & (labels < classes)  # else the operator raises
        factor = factor * class_weight[torch.where(inside, labels, 0)]
    divisor = factor.sum() if reduction == "mean" else factor.new_ones(())
    if isinstance(num_items_in_batch, Tensor):
        divisor = num_items_in_batch.to(factor)
    elif num_items_in_batch is not None:
        divisor = factor.new_full((), num_items_in_batch)
    counts = valid.any()
    unit, power = factor.new_ones(()), factor.new_ones(())
    if reduction != "none":
        unit, exponent = torch.frexp(torch.where(counts, divisor.reciprocal(), 1.0))
        power = torch.ldexp(power, exponent)
    hit = factor * ((1 - label_smoothing) * unit)
    mass = hit
    if label_smoothing:
        smooth = valid * (unit * (label_smoothing / classes))
        mass = hit + smooth * (total if class_weight is None else class_weight.sum())
    terms = LossTerms(labels, mass, hit, smooth, class_weight if label_smoothing else None)
    options = options._replace(unit=class_weight is None and reduction != "none")
    operands = _operands(hidden, weight, bias, options)
    if reduction == "none":
        loss, _ = token_losses_in_graph(*operands, *terms, *form, *options)
        return loss.view(shape)
    loss = loss_in_graph(*operands, *terms, power, *form, *options)
    return torch.where(counts, loss, 0 / divisor)  # without tokens a mean is NaN, as in torch


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    precision: str = "bf16",
    chunk: int | None = None,
) -> Any:
    """Compute ``log_softmax(z)[labels]`` of logits z in chunks, and the entropies of softmax(z).

    ``z = softcap * tanh(logit_scale * x / softcap) / temperature``, with ``x = hidden weight^T +
    bias``. Backward computes each chunk's logits again.

    Args:
        temperature: divisor of the logits.
        entropy: whether to return entropies, too.
        hidden, weight, labels, bias, logit_scale, softcap, precision, chunk: see
            `linear_cross_entropy`; each label is a class.
    Returns:
        log-probabilities (...) float32; with `entropy` a tuple of these and entropies (...).
    Raises:
        ValueError: the temperature is not positive, or the device has no FP8.
        IndexError, RuntimeError: what torch's operators raise for these tensors.
    """
    if not torch.compiler.is_compiling():
        check_arguments(linear_log_probs, locals())
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    hidden = plain(hidden)
    form = LogitForm(logit_scale, softcap or 0.0, temperature)
    options = _options(hidden, precision, chunk)._replace(wants_entropy=entropy)
    reason = _reason_for_stock(hidden, weight, labels, bias, options)
    if reason is not None:
        log_p = _stock_logits(hidden, weight, bias, form, reason).log_softmax(-1)
        chosen = log_p.gather(1, labels.reshape(-1, 1)).view(labels.shape)
        return (chosen, -(log_p.exp() * log_p).sum(-1).view(labels.shape)) if entropy else chosen
    shape, labels = labels.shape, labels.reshape(-1).to(torch.int64)
    minus = torch.full(labels.shape, -1.0, dtype=torch.float32, device=hidden.device)
    terms = LossTerms(labels, minus, minus)
    operands = _operands(hidden, weight, bias, options)
    log_p, entropies = token_losses_in_graph(*operands, *terms, *form, *options)
    return (log_p.view(shape), entropies.view(shape)) if entropy else log_p.view(shape)


def _options(hidden: Tensor, precision: str, chunk: int | None) -> HeadOptions:
    if precision not in ("bf16", "fp8"):
        raise ValueError(f"precision must be 'bf16' or 'fp8', got {precision!r}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be a positive number of tokens, got {chunk}")
    fp8 = precision == "fp8"
    if fp8:
        check_device(hidden.device, "tensorwise", False)
    wants = (False, False, False, False)
    return HeadOptions(output_dtype(hidden), _NO_LABEL, fp8, False, *wants, chunk or 0)


def _reason_for_stock(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, options: HeadOptions
) -> str | None:
    """Return why torch computes a loss from all logits, "" for no warning, or None if it does not.

    Raises:
        ValueError: a tensor is sharded.
    """
    for name, x in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        if isinstance(x, DTensor):
            raise ValueError(
                f"`{name}` is a DTensor with {x.placements}; the loss needs whole rows of logits: "
                "pass full_tensor() of a gathered weight, and to_local() of replicated activations"
            )
    if labels.is_floating_point():
        return "labels are probabilities"
    if options.dtype not in _DTYPES or hidden.dtype not in _DTYPES:
        return f"hidden states are {hidden.dtype}"
    if in_high_precision():
        asked = current_pass.requested and not current_pass.is_exporting()
        return "" if asked else "torch.func, torch.export or a tracer runs the forward"
    shapes = hidden.ndim > 0 and weight.ndim == 2 and hidden.shape[-1] == weight.shape[1]
    shapes = shapes and labels.shape == hidden.shape[:-1]
    shapes = shapes and (bias is None or bias.shape == weight.shape[:1])
    integer = labels.dtype in (torch.int64, torch.uint8)
    encoded = isinstance(weight, SplitWeight | QuantizableTensor)
    dtypes = {x.dtype for x in (None if encoded else weight, bias) if x is not None}
    fitting = options.fp8 or autocast_dtype(hidden.device.type) is not None
    fitting = fitting or dtypes <= {options.dtype}
    return None if shapes and integer and fitting else ""


def _stock_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, form: LogitForm, reason: str
) -> Tensor:
    """Return all logits (T, V) as torch computes them; warn with `reason` unless it is ""."""
    x = F.linear(hidden, weight, bias).reshape(-1, weight.shape[0])
    if reason:
        warnings.warn(
            f"FP8: {reason}, so a loss is computed from all logits at once, "
            f"{x.numel() * x.element_size() / 2**20:,.0f} MiB, without chunks",
            stacklevel=3,
        )
    z = x if form.scale == 1 else x * form.scale
    if form.softcap:
        z = (z / form.softcap).tanh() * form.softcap
    z = z if form.temperature == 1 else z / form.temperature
    return z if z.dtype == torch.float64 else z.float()


def _operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return hidden (T, H), weight, the scale of a frozen weight, and bias, as plain tensors."""
    hidden, scale = hidden.reshape(-1, hidden.shape[-1]), None
    if isinstance(weight, Float8FrozenWeight):
        weight, scale = payload_of(weight)
    elif isinstance(weight, SplitWeight):
        exact = options.dtype == torch.float32 and not options.fp8
        weight = weight.clone() if exact else half(weight)
    if not torch.is_grad_enabled():  # the functions see only what requires a gradient
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    return hidden, weight, scale, bias
