"""The arithmetic of one Adam or AdamW step on a weight matrix with 8-bit states.

Each element goes through these lines in float32, in this order. Every operation rounds once (no
fused multiply-add), so the kernel computes the same bits as the reference::

    w  = join(weight, residual)            g = decode(grad)  (-g where the step maximizes)
    g  = g + w * weight_decay              Adam's coupled decay; 0 for AdamW
    w  = w * decay                         AdamW's decoupled decay, 1 - lr * weight_decay; else 1
    m  = m + (g - m) * (1 - beta1)
    v  = v * beta2 + (g * g) * (1 - beta2)
    w  = w - (m / (sqrt(v) * inv_sqrt_correction + eps)) * step_size

with ``step_size = lr / (1 - beta1^t)`` and ``inv_sqrt_correction = 1 / sqrt(1 - beta2^t)``. The
update uses m and v before they are rounded. Then all three are rounded stochastically, because a v
at beta2 = 0.999 changes by less than its spacing and would never change if rounded to nearest.

One random word per element provides the random bits: 0-7 for the weight, 8-15 for m, 12-31 for v.
Without a residual a BF16 weight uses a second word. m needs 8 bits and v 16 or more,
because their change per step is that small against their spacing. The four bits that m and v share
are the lowest of v's.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import GradientParts, StepScalars, WeightMatrix
from torch_fp8.quantization.block_scaled import BlockScaled, decode, encode
from torch_fp8.quantization.formats import GRADIENT, MOMENT1, MOMENT2
from torch_fp8.quantization.scaling import raise_slot, tensor_amax
from torch_fp8.quantization.split_float import RESIDUAL_BITS, join, split
from torch_fp8.quantization.stochastic_rounding import (
    element_index,
    random_words,
    second_words,
    stream_keys,
)

_CHUNK = 1 << 15  # elements at a time, in whole rows, so that temporaries stay small


def adamw_step_reference(
    matrix: WeightMatrix, scalars: StepScalars, lr_multiplier: Tensor | None = None
) -> None:
    """Run the step above, part by part, in plain torch; the reference of `kernels.adamw`.

    Args:
        matrix: the weight and its states, updated in place.
        scalars: the scalars of this step.
        lr_multiplier: () float32, a factor of the learning rate in ``step_size`` and ``decay``, for
            example that of update clipping, which is computed on the device, or None for 1.
    """
    for part in _parts(matrix):
        _step_part(part, scalars, lr_multiplier)


def update_rms_reference(matrix: WeightMatrix, scalars: StepScalars) -> Tensor:
    """Compute StableAdamW's ``sqrt(mean(g^2 / max(v_hat, eps^2)))`` (arXiv 2304.13013), () float32.

    v_hat is the bias-corrected second moment after this step; g is the gradient that enters the
    moments.
    """
    total = torch.zeros((), dtype=torch.float32, device=matrix.weight.device)
    for part in _parts(matrix):
        weight = _joined(part)
        grad = _gradient(part, weight, scalars)
        exp_avg_sq = _second_moment(part, grad, scalars)
        unbiased = exp_avg_sq * scalars.inv_sqrt_correction * scalars.inv_sqrt_correction
        total += ((grad * grad) / unbiased.clamp(min=scalars.eps * scalars.eps)).sum()
    return (total / max(matrix.weight.numel(), 1)).sqrt()


def _step_part(part: WeightMatrix, scalars: StepScalars, lr_multiplier: Tensor | None) -> None:
    decay: float | Tensor = scalars.decay
    step_size: float | Tensor = scalars.step_size
    if lr_multiplier is not None:
        decay = torch.full_like(lr_multiplier, scalars.decay)
        decay = decay + (1 - decay) * (1 - lr_multiplier)
        step_size = lr_multiplier * scalars.step_size
    weight = _joined(part)
    grad = _gradient(part, weight, scalars)
    weight = weight * decay
    exp_avg = decode(part.exp_avg, MOMENT1)
    exp_avg = exp_avg + (grad - exp_avg) * scalars.beta1_complement
    exp_avg_sq = _second_moment(part, grad, scalars)
    # torch's float32 sqrt on the CPU has a wrong last bit in every fifth element.
    root = exp_avg_sq.double().sqrt().float()
    denominator = root * scalars.inv_sqrt_correction + scalars.eps
    weight = weight - (exp_avg / denominator) * step_size

    rows, cols = weight.shape
    index = element_index(rows, cols, part.row, part.col, part.row_length, weight.device)
    keys = stream_keys(part.number, after=scalars.stream)
    words = random_words(index, keys)
    _store(part.exp_avg_sq, encode(exp_avg_sq, MOMENT2, (words >> 12) & 0xFFFFF))
    _store(part.exp_avg, encode(exp_avg, MOMENT1, ((words >> 8) & 0xFF) << 12 | 1 << 11))
    if part.weight.dtype == torch.bfloat16:
        if part.residual is None:
            words = second_words(words, keys)
        weight, residual = split(weight, _residual_bits(part), words)
        if part.residual is not None and residual is not None:
            part.residual.copy_(residual)
    part.weight.copy_(weight)
    if part.amax is not None:
        raise_slot(part.amax, tensor_amax(part.weight))


def _residual_bits(part: WeightMatrix) -> int:
    return 0 if part.residual is None else RESIDUAL_BITS


def _joined(part: WeightMatrix) -> Tensor:
    if part.weight.dtype == torch.float32:
        return part.weight
    return join(part.weight, part.residual, _residual_bits(part))


def _gradient(part: WeightMatrix, weight: Tensor, scalars: StepScalars) -> Tensor:
    grad = part.grad
    if isinstance(grad, GradientParts):
        grad = decode(BlockScaled(grad.qdata, grad.scale), GRADIENT) * grad.multiplier
    else:
        grad = grad.float()
    if scalars.maximize:
        grad = -grad
    return grad + weight * scalars.weight_decay if scalars.weight_decay else grad


def _second_moment(part: WeightMatrix, grad: Tensor, scalars: StepScalars) -> Tensor:
    exp_avg_sq = decode(part.exp_avg_sq, MOMENT2)
    return exp_avg_sq * scalars.beta2 + (grad * grad) * scalars.beta2_complement


def _store(target: BlockScaled, value: BlockScaled) -> None:
    target.qdata.copy_(value.qdata)
    target.scale.copy_(value.scale)


def _parts(matrix: WeightMatrix) -> Iterator[WeightMatrix]:
    """Yield parts of whole rows, with at most `_CHUNK` elements or one row."""
    rows, cols = matrix.weight.shape
    step = max(1, _CHUNK // max(cols, 1))
    for row in range(0, rows if cols else 0, step):
        part, grad = slice(row, row + step), matrix.grad
        if isinstance(grad, GradientParts):
            grad = GradientParts(grad.qdata[part], grad.scale[part], grad.multiplier)
        else:
            grad = grad[part]
        yield matrix._replace(
            weight=matrix.weight[part],
            residual=None if matrix.residual is None else matrix.residual[part],
            grad=grad,
            exp_avg=BlockScaled(*(t[part] for t in matrix.exp_avg)),
            exp_avg_sq=BlockScaled(*(t[part] for t in matrix.exp_avg_sq)),
            row=matrix.row + row,
        )
