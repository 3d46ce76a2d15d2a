"""An output layer with its softmax loss, over chunks of tokens: no more than one has logits.

For each chunk: one product x = h w^T + b, one kernel for losses and gradient
(`torch_fp8.ops.cross_entropy`), and two products, ``dh = dx w`` and ``dw = dx^T h``. The gradient
of the weight is summed in float32: on CUDA by cuBLAS, in the product itself.

torch's own ``F.linear_cross_entropy`` (2.13) has chunks, too. It does not compute this head,
because it sums the weight's gradient in the weight's dtype, or needs a second buffer; returns a
BF16 loss of BF16 logits (7.25 for 7.2486); runs the softmax as separate operators, which move
several times the bytes; has no label smoothing, softcap or logit factor in chunks; and leaves the
graphs of torch.compile.

Legend: T tokens, M tokens of a chunk, H features, V classes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_fp8.kernels.loss_arguments import LogitForm, LossTerms
from torch_fp8.ops.head_products import Head, HeadFP8, HeadOptions, workspace_bytes
from torch_fp8.ops.registry import operator

__all__ = ["HeadOptions", "linear_softmax_loss", "workspace_of"]

Results = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


def _fake(
    hidden: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    terms: LossTerms,
    form: LogitForm,
    options: HeadOptions,
) -> Results:
    (tokens, features), classes, float32 = hidden.shape, weight.shape[0], torch.float32
    known = terms.lse is not None
    of_weight = options.dtype if options.narrow_wgrad else float32

    def empty(wanted: bool, *shape: int, dtype: torch.dtype = float32) -> Tensor | None:
        return hidden.new_empty(shape, dtype=dtype) if wanted else None

    return (
        empty(not known, tokens),
        empty(not known, tokens),
        empty(options.wants_entropy and not known, tokens),
        empty(options.wants_dgrad, tokens, features, dtype=options.dtype),
        empty(options.wants_wgrad, classes, features, dtype=of_weight),
        empty(options.wants_bgrad, classes),
    )


def workspace_of(*args: Any) -> int:
    """Return the bytes that a call of the operator allocates in addition to its results.

    Args:
        args: the flat arguments of ``torch.ops.torch_fp8.linear_softmax_loss``.
    """
    hidden, weight, weight_scale = args[:3]
    options = HeadOptions(*args[-len(HeadOptions._fields) :])
    tokens, features = hidden.shape
    return workspace_bytes(tokens, features, weight, weight_scale is not None, options)


@operator(_fake, results=6, opaque=True)
def linear_softmax_loss(
    hidden: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    terms: LossTerms,
    form: LogitForm,
    options: HeadOptions,
) -> Results:
    """Compute losses of ``softmax(form(hidden weight^T + bias))``, and their sum's gradients.

    Args:
        hidden: (T, H) float32, bfloat16 or float16.
        weight: (V, H) of a floating dtype, or E4M3 with `weight_scale`.
        weight_scale: () float32 dequantization scale of a tensorwise payload, or None if not a
            payload.
        bias: (V,), or None.
        terms: factors of each token's loss; with lse, only the gradients are computed.
        form: logits as a function of the product.
        options: other arguments.
    Returns:
        loss, lse and entropy (T,) float32; gradients of hidden (T, H) in `options.dtype`, of weight
        (V, H) in float32, or `options.dtype` if it is narrow, and of bias (V,) in float32. Results
        that were not requested are None.
    Raises:
        IndexError: on the CPU, if a label is neither a class nor `ignore_index`; on CUDA the
            kernel that looks it up fails, as in torch.
    """
    results = _fake(hidden, weight, weight_scale, bias, terms, form, options)
    ignored = terms.label == options.ignore_index
    _check_labels(terms.label.masked_fill(ignored, 0), len(weight))
    terms = terms._replace(label=terms.label.masked_fill(ignored, -1))
    with torch.autocast(hidden.device.type, enabled=False):
        for gradient in results[4:]:
            if gradient is not None:
                gradient.zero_()
        head = (HeadFP8 if options.fp8 else Head)(weight, weight_scale, bias, form, options)
        head.start(hidden, terms)
        chunk = options.tokens(len(hidden), len(weight))
        for i in range(0, len(hidden), chunk):
            rows = slice(i, min(i + chunk, len(hidden)))
            parts = [None if t is None else t[rows] for t in results[:4]]
            computed = head.run(hidden, rows, terms.part(rows), parts[3], *results[4:])
            for result, values in zip(parts, computed, strict=False):
                if result is not None:
                    result.copy_(values)
    return results


def _check_labels(label: Tensor, classes: int) -> None:
    """Raise IndexError if a label is not a class."""
    if label.is_cpu:
        wrong = label[(label < 0) | (label >= classes)]
        if len(wrong):
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
    elif len(label):  # the kernel of a look-up checks its indices, without waiting
        label.new_zeros(1).expand(classes).gather(0, label)


@register_flop_formula(torch.ops.torch_fp8.linear_softmax_loss)
def _flops(
    hidden_shape: tuple[int, int],
    weight_shape: tuple[int, int],
    *args: Any,
    out_shape: object = None,
    **_: object,
) -> int:
    """Count the products' FLOPs for ``torch.utils.flop_counter``."""
    options = HeadOptions(*args[-len(HeadOptions._fields) :])
    products = 1 + bool(options.wants_dgrad) + bool(options.wants_wgrad)
    return 2 * hidden_shape[0] * hidden_shape[1] * weight_shape[0] * products
