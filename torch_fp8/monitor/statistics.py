"""Statistics of one tensor, computed on its device: what its FP8 cast preserves, and its shape.

Each function returns a float32 vector without waiting for the device. `OPERAND`, `UPDATE` and
`SWIGLU` name its elements, and `REDUCTIONS` states how ranks with other parts of a tensor combine
theirs.

The amax and the columns' largest magnitudes are those of the whole tensor, and the scale is that of
the whole payload. The other statistics use at most `SAMPLE` elements: whole rows, in groups of 128
spread evenly over the tensor.
"""

import torch
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.formats import Format, format_of
from torch_fp8.quantization.payload_shape import BLOCK_SHAPE
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import scale_from_amax
from torch_fp8.tensor.quantized_state import QuantizedState

OPERAND = (
    *("amax", "scale", "underflow", "saturation", "sqnr", "direction_error"),
    *("outliers", "kurtosis"),
)
"""The statistics of an operand of a GEMM:

    amax             the largest magnitude
    scale            the cast's scale, the largest one if there are several
    underflow        share of the nonzero elements that the cast makes zero
    saturation       share of the elements that are larger than the payload can represent
    sqnr             10 log10(sum x^2 / sum (x - Q(x))^2), dB
    direction_error  1 - cos(x, Q(x)) (arXiv 1912.12607)
    outliers         the largest magnitude of a column, over the median of the columns'
    kurtosis         mean(x^4) / mean(x^2)^2: 3 for a normal distribution
"""
CLIP = ("clip", "clip_direction_error")
"""The search for a clip: the factor of the scale with the smallest direction error, and that
error.
"""
UPDATE = ("rms", "flushed")
"""The statistics of a step: StableAdamW's RMS, and the share of elements with v zero and m
nonzero.
"""
SWIGLU = ("alignment", "alignment_mean")
"""The statistics of a gated MLP: |cos| of its channels' gate and up weights, largest and mean."""
SHARPNESS = ("sharpness",)
LEFT_OUT = ("input", "weight", "grad_output")
"""The statistics of a layer's histories: the number of amaxes of each operand that they left
out.
"""

GRAPHS = ("saturated",)
"""The statistic of graphs with scales of the last step: the number of operands, once for each step,
whose values were beyond their scale since the last measured step.
"""

REDUCTIONS = {
    **dict.fromkeys((*LEFT_OUT, *GRAPHS), "max"),
    **dict.fromkeys(("amax", "scale", "saturation", "direction_error", "outliers"), "max"),
    **dict.fromkeys(("kurtosis", "clip_direction_error", "rms", "flushed", "alignment"), "max"),
    **dict.fromkeys(("tokens_most", "tokens_variation", "empty"), "max"),
    "tokens_least": "min",
    **dict.fromkeys(("underflow", "clip", "alignment_mean", "sharpness", "loss"), "mean"),
    "sqnr": "min",
}
"""How ranks combine each statistic: the worst value, or the mean."""

SAMPLE = 2**20
"""The maximum number of elements for the more expensive statistics."""
_GROUP = 128
_CLIPS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
_ROUNDED = 1.05
"""The factor by which rounding to the payload's largest number may reduce a value: half a step is
1/28 in E4M3, and 1/14 in E5M2.
"""


def operand_statistics(
    x: Tensor, payload: QuantizedTensor, *, turned: bool = False, first: int = 0
) -> Tensor:
    """Measure what an operand preserves of its source, (len(OPERAND),) float32.

    Args:
        x: the source (R, C) in float32, bfloat16 or float16, not empty.
        payload: the operand that the GEMM multiplies, (R', C'), possibly with additional columns of
            zeros.
        turned: whether the payload is the transpose, (C', R').
        first: the index of x's first row in the whole tensor, if `x` is a rank's part.
    """
    columns = x.abs().amax(0).float()
    amax = columns.amax()
    matrix, row, col = (x.t(), 0, first) if turned else (x, first, 0)  # (C, R) or (R, C)
    rows = _rows(*matrix.shape)
    exact = _take(matrix, rows).float()
    cols = slice(col, col + matrix.shape[1])
    parts = [
        _codes_and_values(payload, slice(row + part.start, row + part.stop), cols)
        for part in rows or [slice(0, matrix.shape[0])]
    ]
    codes, values = (torch.cat(part) for part in zip(*parts, strict=True))
    power = exact.square()
    median = columns.median().clamp(min=torch.finfo(torch.float32).tiny)
    outliers = torch.where(amax == 0, 1.0, amax / median)
    kurtosis = torch.where(amax == 0, 0.0, power.square().mean() / power.mean().square())
    sums = row_sums(exact, codes, values, format_of(payload.qdata.dtype)).sum(0)
    shares_and_sqnr, error = preserved(sums)[:3], direction_error(exact, values)  # more exact
    scale = payload.scale.amax().float()
    return torch.stack([amax, scale, *shares_and_sqnr, error, outliers, kurtosis])


def row_sums(exact: Tensor, codes: Tensor, values: Tensor, format: Format) -> Tensor:
    """Return the sums of each row from which `preserved` computes statistics, (R, 7) float32.

    Args:
        exact: (R, C) float32, the source.
        codes, values: (R, C) float32, its codes, and the codes times their scales.
        format: the format of the codes.
    """
    nonzero = exact != 0
    # Rounding to the largest number may reduce a value by half a step.
    half_step = 1.1 if format.max > 1000 else _ROUNDED
    beyond = (codes.abs() >= format.max) & (exact.abs() > values.abs() * half_step)
    columns = (
        *(nonzero, (values == 0) & nonzero, beyond, torch.ones_like(exact)),
        *(exact.square(), values.square(), (exact - values).square()),
    )
    return torch.stack([column.sum(1, dtype=torch.float32) for column in columns], 1)


def preserved(sums: Tensor) -> tuple[Tensor, ...]:
    """Return underflow, saturation, SQNR and direction error from sums of rows (..., 7)."""
    nonzero, flushed, beyond, count, signal, power, noise = sums.unbind(-1)
    return (
        flushed / nonzero.clamp(min=1),
        beyond / count.clamp(min=1),
        decibel(signal, noise),
        one_minus_cosine(signal.sqrt(), power.sqrt(), noise),
    )


def worst(first: Tensor, second: Tensor) -> Tensor:
    """Return the worse of two payloads' statistics, each (len(OPERAND),), element by element."""
    both = torch.stack([first, second])
    joined, least = both.amax(0), OPERAND.index("sqnr")
    joined[least] = both[:, least].amin()
    return joined


def left_out(history: Tensor, reported: Tensor) -> tuple[Tensor, Tensor]:
    """Count the amaxes that histories have left out since the last call, and clear their marks.

    The newest entry keeps its mark, because `push_amax` needs it, so the next call sees it again.

    Args:
        history: (N, H) float32, see `torch_fp8.quantization.scaling.push_amax`.
        reported: (N,) float32, whether the last call has counted its newest entry.
    Returns:
        The numbers (N,), and `reported` for the next call.
    """
    marks = history.signbit()
    history[:, 1:].abs_()
    return (marks.sum(1) - reported).clamp(min=0), marks[:, 0].float()


def clip_statistics(x: Tensor, spec: CastSpec, amax: Tensor) -> Tensor:
    """Search for the clip of a tensorwise scale that changes the direction least, (2,) float32.

    Args:
        x: (R, C).
        spec: format; tensorwise.
        amax: () float32.
    """
    part = _take(x, _rows(*x.shape))
    exact, scale = part.float(), scale_from_amax(amax, spec.format)
    errors = [
        direction_error(exact, dequantize(quantize(part, spec, scale * clip))) for clip in _CLIPS
    ]
    least, index = torch.stack(errors).min(0)
    clips = torch.tensor(_CLIPS, device=x.device, dtype=torch.float32)
    return torch.stack([clips.take(index), least])  # clips[index] would wait for the device


def update_statistics(
    grad: Tensor, state: dict[str, Tensor], beta2: float, eps: float, step: Tensor | float
) -> Tensor:
    """Measure the next Adam step, (len(UPDATE),) float32.

    ``rms = sqrt(mean(g^2 / max(v_hat, eps^2)))`` with the bias-corrected v after the step
    (StableAdamW, arXiv 2304.13013).

    Args:
        grad: (R, K), of any floating dtype.
        state: the optimizer's state before the step, from our or torch's Adam, with elements (R,
            K).
        beta2, eps: the options of the parameter's group.
        step: the number of this step, from 1.
    """
    rows = _rows(grad.shape[0], grad.shape[1])
    g = _take(grad, rows).float()
    m, v = (_rows_of_moment(state[name], grad.shape, rows) for name in ("exp_avg", "exp_avg_sq"))
    v_hat = (v * beta2 + g.square() * (1 - beta2)) / (1 - beta2**step)
    rms = (g.square() / v_hat.clamp(min=eps * eps)).mean().sqrt()
    live = m.square() > torch.finfo(torch.float32).tiny
    flushed = ((v == 0) & live).sum() / live.sum().clamp(min=1)
    return torch.stack([rms, flushed.float()])


def alignment_statistics(gate: Tensor, up: Tensor) -> Tensor:
    """Measure how parallel the weights of a gated MLP's channels are, (len(SWIGLU),) float32.

    Args:
        gate, up: (C, K) each, with one row for each channel.
    """
    gate, up = gate.float(), up.float()
    cos = torch.nn.functional.cosine_similarity(gate, up, dim=1).abs()
    return torch.stack([cos.amax(), cos.mean()])


def logit_sharpness(logits: Tensor, grad: Tensor) -> Tensor:
    """Measure how sharp the loss is around the logits of the last token, (1,) float32.

    ``100 (max L(y + z) - L(y)) / (1 + L(y))`` over all ``|z_i| <= 0.001 (|y_i| + 1)`` (arXiv
    2405.18710). L, the cross entropy, grows with each logit but the target's, so the maximum is in
    a corner. The target is the only logit whose gradient is negative.

    Args:
        logits: (..., V).
        grad: the gradient of the loss with respect to the logits; tokens without a gradient don't
            count.
    """
    # (..., V) -> (tokens, V)
    logits, grad = logits.reshape(-1, logits.shape[-1]), grad.reshape(-1, grad.shape[-1])
    lowest, target = grad.min(1)
    counts = torch.arange(1, len(lowest) + 1, device=grad.device) * (lowest < 0)
    last = counts.argmax()
    y, target = logits.index_select(0, last[None])[0].float(), target.take(last)
    room = 1e-3 * (y.abs() + 1)
    is_target = torch.arange(len(y), device=y.device) == target
    corner = torch.where(is_target, y - room, y + room)
    loss, worst = y.logsumexp(0) - y.take(target), corner.logsumexp(0) - corner.take(target)
    return (100 * (worst - loss) / (1 + loss)).reshape(1)


def _rows(rows: int, cols: int) -> list[slice] | None:
    """Return the rows of a sample of at most `SAMPLE` elements, evenly spread, or None for all
    rows."""
    groups = max(SAMPLE // (max(cols, 1) * _GROUP), 1)
    total = -(-rows // _GROUP)
    if total <= groups:
        return None
    starts = [(i * total // groups) * _GROUP for i in range(groups)]
    return [slice(start, min(start + _GROUP, rows)) for start in starts]


def _take(x: Tensor, rows: list[slice] | None) -> Tensor:
    return x if rows is None else torch.cat([x[part] for part in rows])


def _codes_and_values(payload: QuantizedTensor, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
    """Return a part of a payload as float32: its codes, and the codes times their scales."""
    codes, scale = payload.qdata[rows, cols].float(), payload.scale
    if scale.ndim:
        high, wide = BLOCK_SHAPE.get(payload.granularity, (1, payload.qdata.shape[1]))
        row = torch.arange(rows.start, rows.stop, device=scale.device) // high
        col = torch.arange(cols.start, cols.stop, device=scale.device) // wide
        scale = scale.index_select(0, row).index_select(1, col)
    return codes, codes * scale


def _rows_of_moment(moment: Tensor, shape: torch.Size, rows: list[slice] | None) -> Tensor:
    if isinstance(moment, QuantizedState) and not getattr(moment, "written", None):
        return moment.decode_rows(type(moment.codes)(*(_take(x, rows) for x in moment.codes)))
    return _take(moment.reshape(shape), rows).float()


def decibel(signal: Tensor, noise: Tensor) -> Tensor:
    """Return 10 log10(signal / noise), at most 120; 120 if both are zero."""
    ratio = signal / noise.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(signal == 0, 120.0, (10 * ratio.log10()).clamp(max=120.0))


def direction_error(exact: Tensor, kept: Tensor) -> Tensor:
    """Return 1 - cos of two tensors; 1 if exactly one of them is zero."""
    return one_minus_cosine(exact.norm(), kept.norm(), (exact - kept).square().sum())


def one_minus_cosine(a: Tensor, b: Tensor, noise: Tensor) -> Tensor:
    """Return 1 - cos from two vectors' norms and the squared norm of their difference."""
    # 1 - cos = (|a - b|^2 - (|a| - |b|)^2) / (2 |a| |b|), without the cancellation near 1.
    apart = noise - (a - b).square()
    error = (apart / (2 * a * b).clamp(min=torch.finfo(torch.float32).tiny)).clamp(0, 2)
    return torch.where(a == 0, 0.0, torch.where(b == 0, 1.0, error))
