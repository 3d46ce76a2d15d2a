"""The autograd functions of an output layer with its loss; see `torch_fp8.nn.loss_head`.

Legend: T tokens, H features, V classes.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import is_traced, saves_nothing, stand_in
from torch_fp8.autograd.function import differentiable_by, only_shape_matters, shape_of_result
from torch_fp8.kernels.loss_arguments import LogitForm, LossTerms
from torch_fp8.ops.linear_cross_entropy import HeadOptions, linear_softmax_loss
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.saved_tensors import save_by_name, saved_by_name


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    """Raise RuntimeError, because gradients that forward has computed have no graph."""
    raise RuntimeError(
        "the gradients of linear_cross_entropy and linear_log_probs cannot be differentiated, as "
        "create_graph=True asks for (penalties on gradients, Hessian products); run the forward of "
        "this loss within torch_fp8.high_precision(), where it is computed from all logits"
    )


def _scaled(
    grad: Tensor | None, factor: Tensor, dtype: torch.dtype, in_place: bool = False
) -> Tensor | None:
    """Return grad times factor (), multiplied in float32 and rounded once to `dtype`.

    In backward the result is a new tensor, because a graph that is retained runs again.
    """
    if grad is None:
        return None
    factor = factor.view([1] * grad.ndim)  # CUDA would round a factor () to grad's dtype
    if in_place and (grad.is_cpu or grad.dtype == dtype):
        return grad.mul_(factor).to(dtype)
    if torch.compiler.is_compiling():
        return (grad * factor).to(dtype)
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def _wants(
    ctx: Any, options: HeadOptions, hidden: Tensor, weight: Tensor, *, may_drop: bool
) -> HeadOptions:
    """Return options with the gradients that the function's inputs need.

    If a single product computes the gradient of the weight, it rounds the result, as torch does.
    So up to 4,096 tokens need no float32 gradient, which takes 2 GiB in Llama-3.1-8B.
    """
    dgrad, wgrad, _, bgrad = ctx.needs_input_grad[:4]
    if may_drop and saves_nothing():
        dgrad = wgrad = bgrad = False
    tokens, dtype = hidden.shape[0], options.dtype
    narrow = weight.dtype == dtype != torch.float32 and wgrad and not options.fp8
    narrow = narrow and isinstance(tokens, int) and tokens <= options.tokens(tokens, len(weight))
    wants = {"wants_dgrad": dgrad, "wants_wgrad": wgrad, "wants_bgrad": bgrad}
    return options._replace(**wants, narrow_wgrad=narrow)


def payload_of(weight: Any, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return a weight (V, H) and its scale () as the operator takes them.

    Weights that are frozen, or that FSDP2 gathers, in FP8 have the payload of the products, or are
    dequantized if it has another granularity.
    """
    if not isinstance(weight, QuantizableTensor):
        return weight, scale
    payload: Any = weight.payload
    if payload.spec.granularity == "tensorwise" and not getattr(payload, "first_row", 0):
        return payload.qdata, payload.scale
    return weight.dequantize(), None


class _Loss(torch.autograd.Function):
    """The sum of losses times `power` (), whose gradients forward computes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        terms: LossTerms,
        power: Tensor,
        form: LogitForm,
        options: HeadOptions,
    ) -> Tensor:
        options = _wants(ctx, options, hidden, weight, may_drop=True)
        operands = hidden, *payload_of(weight, weight_scale), bias
        loss, _, _, *grads = linear_softmax_loss(*operands, terms, form, options)
        assert loss is not None
        total = loss.sum() * power
        dgrad, wgrad, _, bgrad = ctx.needs_input_grad[:4]
        if not (dgrad or wgrad or bgrad):
            return total
        ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        saved: dict[str, Tensor | None] = {"power": power}
        of_saved = [options.dtype, *ctx.dtypes[1:]]
        for i, (x, needed) in enumerate(((hidden, dgrad), (weight, wgrad), (bias, bgrad))):
            if needed and not options.wants_gradient:
                saved[str(i)] = stand_in(x.shape, of_saved[i], x)
            elif needed:  # release the float32 gradient of the weight
                if i > 0:
                    grads[i] = _scaled(grads[i], power, of_saved[i], in_place=True)
                saved[str(i)] = grads[i]
                grads[i] = None
        save_by_name(ctx, saved)
        return total

    @staticmethod
    @differentiable_by(_refuse)
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        saved = saved_by_name(ctx)
        factors = grad_loss * saved["power"], grad_loss, grad_loss
        of_hidden, of_weight, of_bias = (
            _scaled(saved.get(str(i)), factor, dtype)
            for i, (factor, dtype) in enumerate(zip(factors, ctx.dtypes, strict=True))
        )
        return of_hidden, of_weight, None, of_bias, None, None, None, None


class _TokenLosses(torch.autograd.Function):
    """The loss and entropy of each token (T,), whose gradients backward computes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        terms: LossTerms,
        form: LogitForm,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        given = hidden, *payload_of(weight, weight_scale), bias
        loss, lse, entropy, *_ = linear_softmax_loss(*given, terms, form, options)
        assert loss is not None
        if entropy is None:
            entropy = loss.new_empty(0)
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            known = terms._replace(lse=lse, entropy=entropy if options.wants_entropy else None)
            operands = {"hidden": hidden, "weight": weight, "scale": weight_scale, "bias": bias}
            save_by_name(ctx, {**operands, **dict(zip(known._fields, known, strict=True))})
            ctx.form, ctx.options = form, options
        return loss, entropy

    @staticmethod
    @differentiable_by(_refuse)
    def backward(
        ctx: Any, grad_loss: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = saved_by_name(ctx)
        hidden, weight, scale, bias = (saved.get(n) for n in ("hidden", "weight", "scale", "bias"))
        assert hidden is not None
        assert weight is not None
        terms = LossTerms(**{name: saved.get(name) for name in LossTerms._fields})
        if grad_loss is None:
            grad_loss = torch.zeros_like(terms.mass)
        smooth = None if terms.smooth is None else terms.smooth * grad_loss
        mass, hit = terms.mass * grad_loss, terms.hit * grad_loss
        terms = terms._replace(mass=mass, hit=hit, smooth=smooth)
        if ctx.options.wants_entropy and grad_entropy is not None:
            terms = terms._replace(spread=grad_entropy.to(torch.float32))
        options = _wants(ctx, ctx.options, hidden, weight, may_drop=False)._replace(unit=False)
        operands = hidden, *payload_of(weight, scale), bias
        *_, of_hidden, of_weight, of_bias = linear_softmax_loss(*operands, terms, ctx.form, options)
        grads = (
            grad.to(x.dtype) if wanted and x is not None and grad is not None else None
            for grad, x, wanted in zip(
                (of_hidden, of_weight, of_bias), (hidden, weight, bias), options[5:8], strict=True
            )
        )
        of_hidden, of_weight, of_bias = grads
        return of_hidden, of_weight, None, of_bias, None, None, None


@torch.compiler.allow_in_graph
def loss_in_graph(*arguments: Any) -> Tensor:
    """Run `_Loss`; one node of Dynamo's graph, which takes tensors and numbers.

    Args:
        arguments: hidden, weight, weight_scale and bias, `LossTerms`, power, `LogitForm` and
            `HeadOptions`, all in a row.
    """
    operands, terms, power, form, options = _grouped(arguments, 1)
    if is_traced() and only_shape_matters(operands[0]):
        return shape_of_result((), torch.float32, *operands)
    return _Loss.apply(*operands, terms, *power, form, options)


@torch.compiler.allow_in_graph
def token_losses_in_graph(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run `_TokenLosses`, as `loss_in_graph` does."""
    operands, terms, _, form, options = _grouped(arguments, 0)
    if is_traced() and only_shape_matters(operands[0]):
        tokens = operands[0].shape[0]
        of_entropy = tokens if options.wants_entropy else 0
        shapes = (tokens,), (of_entropy,)
        loss, entropy = (shape_of_result(s, torch.float32, *operands) for s in shapes)
        return loss, entropy
    loss, entropy = _TokenLosses.apply(*operands, terms, form, options)
    return loss, entropy


def _grouped(arguments: tuple[Any, ...], powers: int) -> tuple[Any, ...]:
    groups, start = [], 0
    sizes = (4, len(LossTerms._fields), powers, len(LogitForm._fields), len(HeadOptions._fields))
    for size in sizes:
        groups.append(arguments[start : start + size])
        start += size
    operands, terms, power, form, options = groups
    return operands, LossTerms(*terms), power, LogitForm(*form), HeadOptions(*options)
