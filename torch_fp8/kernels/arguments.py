"""Tuples of arguments that operators hand to their kernels."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import BlockScaled


class StepScalars(NamedTuple):
    """The numbers of an optimizer step that are equal for all elements of a parameter."""

    beta1_complement: float
    beta2: float
    beta2_complement: float
    step_size: float
    inv_sqrt_correction: float
    eps: float
    decay: float
    weight_decay: float
    maximize: bool
    keys: tuple[int, int]


class GradientParts(NamedTuple):
    """An 8-bit gradient: codes (R, K), scales (R, ceil(K / 32)) and a () float32 factor of all
    values.
    """

    qdata: Tensor
    scale: Tensor
    multiplier: Tensor


class WeightPayload(NamedTuple):
    """The FP8 weight of the last step (E4M3, power-of-two scales), which the next step overwrites.

    Attributes:
        granularity: tensorwise or block_128x128.
        qdata: (R, K) as `torch_fp8.ops.quantize.QuantizedTensor` has it.
        scale: the scale of qdata: () or (ceil(R / 128), ceil(K / 128)) float32.
        new_scale: receives the new scale: for tensorwise another tensor, else the very same.
        qdata_t: (K, R), of the transpose, or None.
        scale_t: (ceil(K / 128), ceil(R / 128)), of block_128x128, or None.
    """

    granularity: Literal["tensorwise", "block_128x128"]
    qdata: Tensor
    scale: Tensor
    new_scale: Tensor
    qdata_t: Tensor | None
    scale_t: Tensor | None


class WeightMatrix(NamedTuple):
    """A parameter's tensors as matrices that share its memory and are updated in place.

    Attributes:
        weight: (R, K) contiguous; bfloat16, or float32 without residual.
        residual: as `torch_fp8.quantization.split_float.pack` stores it; None with residual_bits =
        0.
        residual_bits: k; 0 for a float32 weight.
        grad: (R, K) bfloat16 or float32 contiguous, or `GradientParts`.
        exp_avg, exp_avg_sq: the moments, `MOMENT1` and `MOMENT2`.
        row, col: the position at which this shard starts in the whole matrix.
        row_length: columns of the whole matrix.
        amax: () float32, raised to the largest magnitude among the new weights, for whoever casts
            them next; a NaN among them makes it NaN. None: it is not wanted.
        payload: the weight's, written by the kernel alone (the reference leaves it; whoever keeps
            it casts then); None: there is none.
    """

    weight: Tensor
    residual: Tensor | None
    residual_bits: int
    grad: Tensor | GradientParts
    exp_avg: BlockScaled
    exp_avg_sq: BlockScaled
    row: int
    col: int
    row_length: int
    amax: Tensor | None = None
    payload: WeightPayload | None = None


class BackwardInputs(NamedTuple):
    """The arguments of SwiGLU's backward, for ``h = silu(gate) * up * smooth``.

    Legend: R rows (tokens), C columns (features). Tensors have any strides.

    Attributes:
        grad: (R, C) float32, bfloat16 or float16, the gradient of h.
        gate, up: (R, C), or, with their scales, the FP8 that was saved of them.
        gate_scale, up_scale: (R, ceil(C / 128)) float32 or None.
        smooth: (C,) float32 or None.
        out_dtype: the dtype of the gradients of gate and up.
    """

    grad: Tensor
    gate: Tensor
    gate_scale: Tensor | None
    up: Tensor
    up_scale: Tensor | None
    smooth: Tensor | None
    out_dtype: torch.dtype


NUM_INPUTS = len(BackwardInputs._fields)
