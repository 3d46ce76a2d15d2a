"""Statistics of fused experts, on their device: of the worst expert and of a router's choice.

Each function returns a float32 vector that nobody has waited for. `WORST` and `TOKENS` name the
elements. An expert without rows in a pass has no part in the worst of it.

Legend: E experts, N rows of an expert's weight, K columns, T tokens, R rows of all experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.monitor.statistics import SAMPLE, decibel, half_step, one_minus_cosine
from torch_fp8.ops.moe_route import group_of_rows
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.formats import format_of

WORST = ("amax", "scale", "underflow", "saturation", "sqnr", "direction_error")
"""The statistics of an operand of a grouped GEMM, as `torch_fp8.monitor.statistics.OPERAND` has
them: amax and scale of all experts, each of the others of the expert where it is worst.
"""
TOKENS = ("tokens_least", "tokens_most", "tokens_variation", "empty")
"""The statistics of a router's choice:

    tokens_least, tokens_most  tokens of the expert with the fewest, and the most
    tokens_variation           standard deviation over the mean of the experts' tokens
    empty                      experts without a token, counted from `ENOUGH` tokens an expert on
"""
REPLAYED = ("differing",)
"""The share of a router's decisions that a routing replay has changed."""
ENOUGH = 16
"""The mean tokens of an expert from which one without any is no accident."""
_LEAST_ROWS = 16
"""Rows of each expert's weight that the statistics are taken of, at least."""


def rows_statistics(
    x: Tensor, payload: QuantizedTensor, offs: Tensor, token: Tensor | None
) -> Tensor:
    """Measure what the rows of each expert keep of their source, (len(WORST),) float32.

    Args:
        x: (T, K) source, or (R, K) where `token` is None.
        payload: what was cast of it, with a scale a row.
        offs: (E,) ends of the experts' rows.
        token: (R,) token of each row, T for a row of padding; or None.
    """
    sums = _row_sums(x, payload)
    if token is not None:
        sums = F.pad(sums, (0, 0, 0, 1))[token]  # (T, 7) -> (R, 7)
    return _worst(x, payload, sums, group_of_rows(offs, len(sums)), len(offs))


def weight_statistics(weight: Tensor, payload: QuantizedTensor) -> Tensor:
    """Measure what each expert's weight keeps, (len(WORST),) float32, of a sample of its rows.

    Args:
        weight: (E, N, K) source.
        payload: what was cast of it, (E, N, K) with scales (E, N, 1).
    """
    experts, rows, cols = weight.shape
    count = min(rows, max(_LEAST_ROWS, SAMPLE // max(experts * cols, 1)))
    of_expert = torch.arange(count, device=weight.device) * rows // count
    codes = payload.qdata.view(torch.uint8)
    parts = (t[:, of_expert].flatten(0, 1) for t in (weight, codes, payload.scale))
    x, codes, scale = parts
    sample = payload._replace(qdata=codes.view(payload.qdata.dtype), scale=scale)
    group = torch.arange(experts, device=weight.device).repeat_interleave(count)
    return _worst(weight.flatten(0, 1), payload, _row_sums(x, sample), group, experts)


def token_statistics(counts: Tensor) -> Tensor:
    """Measure how a router has spread tokens, (len(TOKENS),) float32.

    Args:
        counts: (E,) tokens of each expert.
    """
    counts = counts.float()
    mean = counts.mean()
    variation = counts.std(correction=0) / mean.clamp(min=1)
    empty = torch.where(mean >= ENOUGH, (counts == 0).sum().float(), 0.0)
    return torch.stack([counts.amin(), counts.amax(), variation, empty])


def _row_sums(x: Tensor, payload: QuantizedTensor) -> Tensor:
    """Return what the statistics need of each row, (rows, 7) float32, a part of them at a time."""
    step = max(1, SAMPLE // max(x.shape[1], 1))
    format = format_of(payload.qdata.dtype)
    parts = []
    for first in range(0, max(len(x), 1), step):
        some = slice(first, first + step)
        exact, codes = x[some].float(), payload.qdata[some].float()
        values = codes * payload.scale[some]
        nonzero = exact != 0
        beyond = (codes.abs() >= format.max) & (exact.abs() > values.abs() * half_step(format))
        columns = (
            *(nonzero, (values == 0) & nonzero, beyond, torch.ones_like(exact)),
            *(exact.square(), values.square(), (exact - values).square()),
        )
        parts.append(torch.stack([column.float().sum(1) for column in columns], 1))
    return torch.cat(parts)


def _worst(
    x: Tensor, payload: QuantizedTensor, sums: Tensor, group: Tensor, experts: int
) -> Tensor:
    """Join the rows of each expert, and take the worst of them.

    Args:
        x: source.
        payload: what was cast of it.
        sums: (rows, 7) see `_row_sums`.
        group: (rows,) expert of each row, E for none.
        experts: E.
    """
    joined = sums.new_zeros(experts + 1, sums.shape[1]).index_add_(0, group, sums)[:experts]
    nonzero, flushed, beyond, count, signal, power, noise = joined.unbind(1)
    return torch.stack(
        [
            x.abs().amax().float(),
            payload.scale.amax().float(),
            (flushed / nonzero.clamp(min=1)).amax(),
            (beyond / count.clamp(min=1)).amax(),
            decibel(signal, noise).amin(),
            one_minus_cosine(signal.sqrt(), power.sqrt(), noise).amax(),
        ]
    )
