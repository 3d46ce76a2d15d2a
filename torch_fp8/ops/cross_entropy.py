"""Softmax losses of a chunk of logits, and their gradients, written over the logits or in FP8.

For a token with logits z (V,), ``p = softmax(z)``, ``lse = log(sum(exp(z)))``, and the factors of
`LossTerms`::

    loss = mass * lse - hit * z[label] - smooth * sum(class_weight * z) + spread * entropy
    dz   = mass * p - hit * onehot(label) - smooth * class_weight - spread * p * (log(p) + entropy)

A cross entropy with label smoothing, an ignored label, class weights and factors of tokens is such
a loss, as are a token's log-probability and entropy. z is computed from the product x of hidden
states and weight by `LogitForm`, rounded to x's dtype as stock operators round it; everything else
is float32.

**FP8.** The gradient is cast to E5M2 with one power-of-two scale. The gradient of a cross entropy
without other factors is softmax minus one-hot, bounded by 1, so that its scale is a constant. E5M2
has two bits of mantissa: in a flat softmax every p is rounded the same way, and the sum of a row
would be off by up to 11 %; the element of the label is as large as all others together, and its
rounding alone would be off by as much. So the payload is 0 at the label, whose gradient is returned
in float32, and `balance` corrects the row for what rounding has changed in its sum.

Legend: M tokens, V classes.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.loss_arguments import LogitForm, LossTerms
from torch_fp8.ops.quantize import cast_saturating
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.formats import E5M2
from torch_fp8.quantization.payload_shape import multiple_of_16

_PART = 2**20
"""Elements that the references compute at once, so that no temporary has the size of a chunk; on
CUDA cards without FP8, where launches take time, 64 times as many.
"""

Statistics = tuple[Tensor | None, Tensor | None, Tensor | None]


def form_logits(x: Tensor, form: LogitForm) -> tuple[Tensor, Tensor | None]:
    """Return the logits z of x (M, V) in float32, and the tanh of a softcap."""
    z, bounded = x, None
    if form.scale != 1:
        z = _times(z, form.scale)
    if form.softcap:
        bounded = _times(z, 1 / form.softcap).float().tanh().to(x.dtype)
        z = _times(bounded, form.softcap)
    if form.temperature != 1:
        z = _times(z, 1 / form.temperature)
    return z.float(), bounded


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    return (x.float() * factor).to(x.dtype)


def _form_gradient(
    grad: Tensor, bounded: Tensor | None, form: LogitForm, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of x from that of z, rounded in each step as stock's is."""
    if form == LogitForm():
        return grad
    grad = grad.to(dtype)
    if form.temperature != 1:
        grad = _times(grad, 1 / form.temperature)
    if bounded is not None:
        grad = _times(_times(grad, form.softcap), 1 - bounded.float().square())
        grad = _times(grad, 1 / form.softcap)
    if form.scale != 1:
        grad = _times(grad, form.scale)
    return grad.float()


def _statistics(z: Tensor, terms: LossTerms, wants_entropy: bool) -> Statistics:
    lse = z.logsumexp(1) if z.shape[1] else z.new_full((len(z),), -torch.inf)
    has_label = terms.label >= 0
    at_label = z.gather(1, terms.label.clamp(min=0)[:, None])[:, 0]  # (M,)
    loss = terms.mass * lse - terms.hit * at_label
    if terms.smooth is not None:
        weight = 1.0 if terms.class_weight is None else terms.class_weight
        loss = loss - terms.smooth * (z * weight).sum(1)
    entropy = None
    if wants_entropy:
        log_p = z - lse[:, None]
        entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(torch.float32).min)).sum(1)
    return torch.where(has_label, loss, 0.0), lse, entropy


def _gradient(x: Tensor, terms: LossTerms, form: LogitForm) -> Tensor:
    """Return the gradient of x in float32; `terms` has lse."""
    z, bounded = form_logits(x, form)
    assert terms.lse is not None
    log_p = z - terms.lse[:, None]
    p = log_p.exp()
    grad = p * terms.mass[:, None]
    if terms.smooth is not None:
        weight = 1.0 if terms.class_weight is None else terms.class_weight
        grad -= terms.smooth[:, None] * weight
    if terms.spread is not None:
        assert terms.entropy is not None
        finite = log_p.clamp(min=torch.finfo(torch.float32).min)
        grad -= terms.spread[:, None] * p * (finite + terms.entropy[:, None])
    grad -= terms.hit[:, None] * _at_label(grad, terms.label)
    return _form_gradient(grad, bounded, form, x.dtype)


def _at_label(x: Tensor, label: Tensor) -> Tensor:
    """Return the mask (M, V) of the labels of x (M, V)."""
    return torch.arange(x.shape[1], device=x.device)[None, :] == label[:, None]


def _parts(x: Tensor) -> list[slice]:
    rows = max(1, (_PART if x.is_cpu else 64 * _PART) // max(1, x.shape[1]))
    return [slice(i, min(i + rows, len(x))) for i in range(0, len(x), rows)]


def _rows_fake(
    logits: Tensor, terms: LossTerms, form: LogitForm, gradient: bool, wants_entropy: bool
) -> Statistics:
    known = terms.lse is not None
    loss, lse, entropy = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
    return None if known else loss, None if known else lse, entropy if wants_entropy else None


@operator(_rows_fake, writes="logits")
def cross_entropy_rows(
    logits: Tensor, terms: LossTerms, form: LogitForm, gradient: bool, wants_entropy: bool
) -> Statistics:
    """Compute losses, and write their gradient over the logits.

    On CUDA one program reads its row twice and writes it once.

    Args:
        logits: (M, V) float32, bfloat16 or float16, with unit stride along V: the product x; its
            gradient afterwards if `gradient`.
        terms: factors of the losses. If `lse` is known, only the gradient is computed.
        form: logits as a function of the product.
        gradient: whether to write the gradient.
        wants_entropy: whether to compute entropies.
    Returns:
        loss (M,), lse (M,) and entropy (M,) float32, or None if not computed.
    """
    results: list[list[Tensor]] = [[], [], []]
    for rows in _parts(logits):
        x, part = logits[rows], terms.part(rows)
        if part.lse is None:
            computed = _statistics(form_logits(x, form)[0], part, wants_entropy)
            part = part._replace(lse=computed[1])
            for result, values in zip(results, computed, strict=True):
                result += [] if values is None else [values]
        if gradient:
            x.copy_(_gradient(x, part, form))
    loss, lse, entropy = (
        empty if empty is None or not parts else torch.cat(parts)
        for empty, parts in zip(
            _rows_fake(logits, terms, form, gradient, wants_entropy), results, strict=True
        )
    )
    return loss, lse, entropy


Quantized = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]


def _quantize_fake(
    logits: Tensor,
    terms: LossTerms,
    form: LogitForm,
    payload_scale: Tensor,
    rowwise: bool,
    columnwise: bool,
    wants_bias: bool,
) -> Quantized:
    (rows, cols), dtype, float32 = logits.shape, E5M2.dtype, torch.float32
    return (
        logits.new_empty((rows, multiple_of_16(cols)), dtype=dtype) if rowwise else None,
        logits.new_empty((cols, multiple_of_16(rows)), dtype=dtype) if columnwise else None,
        logits.new_empty((3, rows), dtype=float32),
        logits.new_empty(cols, dtype=float32) if wants_bias else None,
    )


@operator(_quantize_fake, results=4)
def cross_entropy_quantize(
    logits: Tensor,
    terms: LossTerms,
    form: LogitForm,
    payload_scale: Tensor,
    rowwise: bool,
    columnwise: bool,
    wants_bias: bool,
) -> Quantized:
    """Cast the gradient of the product to E5M2, except at the labels, in one read.

    Args:
        logits, form: see `cross_entropy_rows`.
        terms: factors of the losses, with lse.
        payload_scale: () float32 power of two, at least the largest gradient divided by E5M2's
            maximum.
        rowwise, columnwise: whether to make the payload, and its transpose.
        wants_bias: whether to sum the gradient over the tokens.
    Returns:
        Payload (M, V') and its transpose (V, M'), where V' and M' are V and M rounded up to
        multiples of 16, with zeros there and at the labels; (3, M) float32: the sums over the other
        classes of the gradient and of the payload's values, and the label's gradient; the
        gradient's sums (V,) float32 over the tokens. Results that were not requested are None.
    """
    row, col, sums, of_bias = _quantize_fake(
        logits, terms, form, payload_scale, rowwise, columnwise, wants_bias
    )
    for payload in (row, col):
        if payload is not None:
            payload.view(torch.uint8).zero_()
    if of_bias is not None:
        of_bias.zero_()
    cols = logits.shape[1]
    for rows in _parts(logits):
        grad = _gradient(logits[rows], terms.part(rows), form)
        if of_bias is not None:
            of_bias += grad.sum(0)
        label = _at_label(grad, terms.label[rows])
        sums[2, rows] = (grad * label).sum(1)
        grad = grad.masked_fill(label, 0.0)
        payload = cast_saturating(grad, payload_scale, E5M2)
        sums[0, rows], sums[1, rows] = grad.sum(1), (payload.float() * payload_scale).sum(1)
        if row is not None:
            row[rows, :cols] = payload
        if col is not None:
            col[:, rows] = payload.t()
    return row, col, sums, of_bias


def balance(sums: Tensor, one_sign: bool) -> tuple[Tensor, Tensor]:
    """Compute each row's factor of its payload, and the gradient at its label.

    Their sum over a row, ``ratio * sum(payload) + label``, is that of the exact gradient.

    Args:
        sums: (3, M) of `cross_entropy_quantize`.
        one_sign: whether the gradients of a row have one sign except at its label; the factor then
            corrects their sum, and the label's gradient stays exact.
    Returns:
        Both (M,) float32.
    """
    exact, rounded, at_label = sums
    ratio = torch.ones_like(exact)
    if one_sign:
        # Underflow may leave nothing, or too little to stand for the rest.
        ratio = torch.where(rounded != 0, exact / rounded, 1.0).clamp(0.5, 2.0)
    return ratio, at_label + (exact - ratio * rounded)
