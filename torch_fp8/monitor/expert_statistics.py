"""Statistics of fused experts, computed on their device: the worst expert, and the router's choice.

Each function returns a float32 vector without waiting for the device. `WORST` and `TOKENS` name its
elements. An expert without rows in a pass is not considered for the worst expert.

Legend: E experts, N rows of an expert's weight, K columns, T tokens, R rows of all experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.monitor.statistics import SAMPLE, preserved, row_sums
from torch_fp8.ops.moe_rows import group_of_rows
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.formats import format_of

WORST = ("amax", "scale", "underflow", "saturation", "sqnr", "direction_error")
"""The statistics of a grouped GEMM's operand, named as in `torch_fp8.monitor.statistics.OPERAND`:
amax and scale over all experts, each of the others from the expert where it is worst.
"""
TOKENS = ("tokens_least", "tokens_most", "tokens_variation", "empty")
"""The statistics of a router's choice of experts:

    tokens_least, tokens_most  tokens of the expert with the fewest, and the most
    tokens_variation           standard deviation over the mean of the experts' tokens
    empty                      experts without a token, counted from `ENOUGH` tokens an expert on
"""
ENOUGH = 16
"""The mean number of tokens per expert at which an expert without any is no accident."""
_LEAST_ROWS = 16
"""The minimum number of rows of each expert's weight that the statistics sample."""


def rows_statistics(
    x: Tensor, payload: QuantizedTensor, offs: Tensor, token: Tensor | None
) -> Tensor:
    """Measure what the cast preserves of each expert's rows, (len(WORST),) float32.

    Args:
        x: the source, (T, K), or (R, K) if `token` is None.
        payload: the source in FP8, with a scale for each row.
        offs: (E,) ends of the experts' rows.
        token: (R,) token of each row, T for padding; or None.
    """
    sums = _row_sums(x, payload)
    if token is not None:
        sums = F.pad(sums, (0, 0, 0, 1))[token]  # (T, 7) -> (R, 7)
    return _worst(x, payload, sums, group_of_rows(offs, len(sums)), len(offs))


def weight_statistics(weight: Tensor, payload: QuantizedTensor) -> Tensor:
    """Measure what the cast preserves of experts' weights, (len(WORST),), from some rows.

    Args:
        weight: the source (E, N, K).
        payload: the source in FP8, (E, N, K) with scales (E, N, 1).
    """
    experts, rows, cols = weight.shape
    count = min(rows, max(_LEAST_ROWS, SAMPLE // max(experts * cols, 1)))
    of_expert = torch.arange(count, device=weight.device) * rows // count
    codes = payload.qdata.view(torch.uint8)
    # (E, N, ...) -> (E * count, ...)
    x, codes, scale = (t[:, of_expert].flatten(0, 1) for t in (weight, codes, payload.scale))
    sample = payload._replace(qdata=codes.view(payload.qdata.dtype), scale=scale)
    group = torch.arange(experts, device=weight.device).repeat_interleave(count)
    return _worst(weight.flatten(0, 1), payload, _row_sums(x, sample), group, experts)


def token_statistics(counts: Tensor) -> Tensor:
    """Measure how a router has distributed tokens, (len(TOKENS),) float32.

    Args:
        counts: (E,) tokens of each expert.
    """
    counts = counts.float()
    mean = counts.mean()
    variation = counts.std(correction=0) / mean.clamp(min=1)
    empty = torch.where(mean >= ENOUGH, (counts == 0).sum().float(), 0.0)
    return torch.stack([counts.amin(), counts.amax(), variation, empty])


def _row_sums(x: Tensor, payload: QuantizedTensor) -> Tensor:
    """Return `torch_fp8.monitor.statistics.row_sums`, (rows, 7), computed in parts."""
    step = max(1, SAMPLE // max(x.shape[1], 1))
    format = format_of(payload.qdata.dtype)
    parts = []
    for first in range(0, max(len(x), 1), step):
        some = slice(first, first + step)
        codes = payload.qdata[some].float()
        parts.append(row_sums(x[some].float(), codes, codes * payload.scale[some], format))
    return torch.cat(parts)


def _worst(
    x: Tensor, payload: QuantizedTensor, sums: Tensor, group: Tensor, experts: int
) -> Tensor:
    """Combine the rows of each expert, and return the worst expert's statistics.

    Args:
        x: the source.
        payload: the source in FP8.
        sums: (rows, 7), see `_row_sums`.
        group: (rows,) expert of each row, E for none.
        experts: the number of experts, E.
    """
    joined = sums.new_zeros(experts + 1, sums.shape[1]).index_add_(0, group, sums)[:experts]
    underflow, saturation, sqnr, error = preserved(joined)
    amax, scale = x.abs().amax().float(), payload.scale.amax().float()
    worst = underflow.amax(), saturation.amax(), sqnr.amin(), error.amax()
    return torch.stack([amax, scale, *worst])
