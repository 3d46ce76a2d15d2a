"""The three products of an output layer with its loss, for one chunk of tokens.

In FP8 all three are tensorwise: hidden states h and weight w in E4M3, the gradient of the logits in
E5M2. The weight is cast once for all chunks. The gradient's payload is 0 at the labels, whose part
of both results is added in float32, from rows of w, and from the cast h.

Legend: T tokens, M tokens of a chunk, H features, V classes.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.loss_arguments import LogitForm, LossTerms
from torch_fp8.ops import registry
from torch_fp8.ops.cross_entropy import balance, cross_entropy_quantize, cross_entropy_rows
from torch_fp8.ops.gemm_operand import operand
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize_layouts, transposed
from torch_fp8.ops.scaled_mm import scaled_matmul
from torch_fp8.quantization.formats import E4M3
from torch_fp8.quantization.payload_shape import multiple_of_16

_STEP = 2**24
"""Elements of a weight's gradient that are computed at once where products cannot add to it."""
_LARGEST_EXPONENT = 15
"""A payload's largest gradient is 2^15, the largest power of two in E5M2. E4M3, whose codes end at
2^-9 of 448, would drop each probability below 4e-6.
"""
_MOST_TOKENS, _FEWER_TOKENS, _MOST_BYTES = 4096, 2048, 5 * 2**28
"""Tokens of a chunk, and of one whose logits would need more bytes: products of fewer are slow."""


class HeadOptions(NamedTuple):
    """The choice of what is computed of an output layer and its loss, and how.

    Attributes:
        dtype: dtype of the logits, and of hidden states and weight in the products.
        ignore_index: label of tokens without loss.
        fp8: whether the products run in FP8.
        unit: whether no gradient of a row is larger than 1 before the logits' factors, so that the
            scale of the payload is a constant.
        wants_entropy, wants_dgrad, wants_wgrad, wants_bgrad: which results to compute.
        chunk: number of tokens that have logits at the same time, or 0 to derive it from memory.
        narrow_wgrad: whether the gradient of the weight is rounded to `dtype` by the product,
            because one chunk has all tokens, instead of summed in float32.
    """

    dtype: torch.dtype
    ignore_index: int
    fp8: bool
    unit: bool
    wants_entropy: bool
    wants_dgrad: bool
    wants_wgrad: bool
    wants_bgrad: bool
    chunk: int
    narrow_wgrad: bool = False

    def tokens(self, tokens: int, classes: int) -> int:
        """Return the number of tokens of a chunk; all chunks are about equally long."""
        if self.chunk:
            return self.chunk
        limit = _MOST_TOKENS
        if limit * classes * self.dtype.itemsize > _MOST_BYTES:
            limit = _FEWER_TOKENS
        chunks = max(1, -(-tokens // limit))
        return max(1, multiple_of_16(-(-tokens // chunks)))

    @property
    def wants_gradient(self) -> bool:
        """Whether the gradient of the logits is needed."""
        return self.wants_dgrad or self.wants_wgrad or self.wants_bgrad


def workspace_bytes(
    tokens: int, features: int, weight: Tensor, is_payload: bool, options: HeadOptions
) -> int:
    """Return the bytes that a loss and its gradients need in addition to arguments and results.

    Args:
        tokens, features: T and H.
        weight: (V, H), stored in FP8 if `is_payload`.
        options: options of the loss, which determine the chunk and the gradients.
    """
    classes = multiple_of_16(len(weight))
    chunk = min(tokens, options.tokens(tokens, len(weight))) * classes
    logits = chunk * options.dtype.itemsize
    if not options.fp8:
        cast = 0 if weight.dtype == options.dtype else weight.numel() * options.dtype.itemsize
        return logits + cast
    layouts = options.wants_dgrad + (not is_payload)
    gradient = chunk * (options.wants_dgrad + options.wants_wgrad)
    return logits + gradient + layouts * weight.numel() + tokens * features


class Head:
    """The products of a chunk in high precision.

    Args:
        weight, weight_scale, bias, form, options: arguments of `linear_softmax_loss`.
    """

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        form: LogitForm,
        options: HeadOptions,
    ) -> None:
        if weight_scale is not None:
            weight = dequantize(QuantizedTensor(weight, weight_scale, "tensorwise"), options.dtype)
        self.weight = weight.to(options.dtype)
        self.bias = None if bias is None else bias.to(options.dtype)
        self.form, self.options = form, options
        self.classes = len(weight)

    def start(self, hidden: Tensor, terms: LossTerms) -> None:
        """Allocate the logits of a chunk; rows start at multiples of 16 elements."""
        rows = min(len(hidden), self.options.tokens(len(hidden), self.classes))
        width = multiple_of_16(self.classes)
        logits = hidden.new_empty((rows, width), dtype=self.options.dtype)
        self.logits = logits[:, : self.classes]

    def run(
        self,
        hidden: Tensor,
        rows: slice,
        terms: LossTerms,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Compute losses, lse and entropies of some rows, and add to the gradients."""
        options = self.options
        h, logits = hidden[rows].to(options.dtype), self.logits[: rows.stop - rows.start]
        if self.bias is None:
            torch.mm(h, self.weight.t(), out=logits)  # (M, H) @ (H, V)
        else:
            torch.addmm(self.bias, h, self.weight.t(), out=logits)
        computed = cross_entropy_rows(
            logits, terms, self.form, options.wants_gradient, options.wants_entropy
        )
        if grad_hidden is not None:
            torch.mm(logits, self.weight, out=grad_hidden)  # (M, V) @ (V, H)
        if grad_weight is not None and options.narrow_wgrad:
            _product_of(grad_weight, logits, h)
        elif grad_weight is not None:
            _add_product(grad_weight, logits, h)
        if grad_bias is not None:
            grad_bias += logits.sum(0, dtype=torch.float32)
        return computed


def _add_product(total: Tensor, grad: Tensor, h: Tensor) -> None:
    """Add ``grad^T h``, (V, M) @ (M, H), to `total` in float32, without a second one of its size.

    cuBLAS reads and writes `total`. On the CPU torch has no product of BF16 with a float32 result:
    parts of it are computed in float32.
    """
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), h)
    elif registry.on_cuda(grad) and not grad.is_cpu:
        torch.addmm(total, grad.t(), h, out_dtype=torch.float32, out=total)
    else:
        wide = h.float()
        for part in _row_parts(total):
            total[part].addmm_(grad[:, part].t().float(), wide)


def _product_of(result: Tensor, grad: Tensor, h: Tensor) -> None:
    """Write ``grad^T h``, (V, M) @ (M, H), summed in float32 and rounded once."""
    if registry.on_cuda(grad) and not grad.is_cpu:
        torch.mm(grad.t(), h, out=result)
    else:
        wide = h.float()
        for part in _row_parts(result):
            result[part] = grad[:, part].t().float() @ wide


def _row_parts(x: Tensor) -> list[slice]:
    rows = max(16, _STEP // max(1, x.shape[1]) // 16 * 16)
    return [slice(i, min(i + rows, len(x))) for i in range(0, len(x), rows)]


class HeadFP8(Head):
    """The products of a chunk in FP8."""

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        form: LogitForm,
        options: HeadOptions,
    ) -> None:
        self.form, self.options, self.classes = form, options, len(weight)
        wants_dgrad = options.wants_dgrad
        if weight_scale is None:
            row, col = quantize_layouts(weight, _both(rowwise=True, columnwise=wants_dgrad))
        else:
            row = QuantizedTensor(weight, weight_scale, "tensorwise")
            col = transposed(row) if wants_dgrad else None
        assert row is not None
        self.payload, self.weight = row, None if weight_scale is not None else weight
        # What a GEMM would pad in each chunk is padded once.
        self.row = operand(row, row.qdata.shape[1], is_b=True)  # (V', H')
        self.col = None if col is None else operand(col, col.qdata.shape[1], is_b=True)  # (H', V')
        more = len(self.row.qdata) - self.classes
        self.bias = None if bias is None else F.pad(bias.to(options.dtype), (0, more))

    def start(self, hidden: Tensor, terms: LossTerms) -> None:
        """Cast the hidden states for the logits, and compute the scale of their gradient."""
        self.hidden, _ = quantize_layouts(hidden, _both(rowwise=True, columnwise=False))
        slope = abs(self.form.scale) / self.form.temperature
        exponent = math.ceil(math.log2(slope)) if slope else 0
        scale = hidden.new_full((), 2.0 ** (exponent - _LARGEST_EXPONENT), dtype=torch.float32)
        self.scale = scale if self.options.unit else scale * _bound(terms, self.classes)

    def run(
        self,
        hidden: Tensor,
        rows: slice,
        terms: LossTerms,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        form, options = self.form, self.options
        h, features = hidden[rows], hidden.shape[1]
        assert self.hidden is not None
        a = self.hidden._replace(qdata=self.hidden.qdata[rows])
        logits = scaled_matmul(
            a, self.row, options.dtype, features, bias=self.bias, fast_accum=True
        )[:, : self.classes]
        computed = cross_entropy_rows(logits, terms, form, False, options.wants_entropy)
        if not options.wants_gradient:
            return computed
        if terms.lse is None:
            terms = terms._replace(lse=computed[1])
        wants = grad_hidden is not None, grad_weight is not None, grad_bias is not None
        row, col, sums, of_bias = cross_entropy_quantize(logits, terms, form, self.scale, *wants)
        del logits
        one_sign = terms.smooth is None and terms.spread is None
        ratio, at_label = balance(sums, one_sign)
        label = terms.label.clamp(min=0)
        if grad_hidden is not None:
            assert self.col is not None
            payload = QuantizedTensor(_present(row), self.scale, "tensorwise")
            product = scaled_matmul(payload, self.col, torch.float32)[:, :features]  # (M, H)
            of_label = self.weight_rows(label) * at_label[:, None]
            grad_hidden.copy_(product * ratio[:, None] + of_label)
        if grad_weight is not None:
            balanced = h.float() * ratio[:, None]
            _, h_t = quantize_layouts(balanced, _both(rowwise=False, columnwise=True))  # (H, M')
            assert h_t is not None
            # The label's part has the same rounded h, so that the sum over the classes is exact.
            of_label = dequantize(h_t)[:, : len(h)].t() * (at_label / ratio)[:, None]
            h_t = operand(h_t, h_t.qdata.shape[1], is_b=True)
            for part in _row_parts(grad_weight):
                of_part = QuantizedTensor(_present(col)[part], self.scale, "tensorwise")
                product = scaled_matmul(of_part, h_t, torch.float32)  # (V, M') @ (H, M')^T
                grad_weight[part] += product[:, :features]
            grad_weight.index_put_((label,), of_label, accumulate=True)
        if grad_bias is not None:
            grad_bias += _present(of_bias)
        return computed

    def weight_rows(self, label: Tensor) -> Tensor:
        """Return rows of the weight in float32, (M, H)."""
        if self.weight is not None:
            return self.weight[label].float()
        payload = self.payload.qdata.view(torch.uint8)[label].view(E4M3.dtype)
        return payload.float() * self.payload.scale


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _both(*, rowwise: bool, columnwise: bool) -> CastOptions:
    return CastOptions(E4M3.dtype, "tensorwise", False, rowwise, columnwise)


def _bound(terms: LossTerms, classes: int) -> Tensor:
    """Return a power of two, () float32, that no gradient of the logits exceeds."""
    largest = torch.maximum(terms.mass.abs(), terms.hit.abs())
    if terms.smooth is not None:
        weight = 1.0 if terms.class_weight is None else terms.class_weight.abs().amax()
        largest = torch.maximum(largest, terms.smooth.abs() * weight)
    if terms.spread is not None:
        # |p (log p + entropy)| is p (1 - p) log(p (V - 1) / (1 - p)) at most, or 1 / e.
        largest = largest + terms.spread.abs() * (math.log(max(classes, 2)) / 4 + 0.4)
    amax = largest.amax() if len(largest) else largest.new_ones(())
    _, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, 0.5 <= mantissa < 1
    # A scale that is not finite makes the payload NaN, so that a diverged gradient stays visible.
    return torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), exponent), amax)
