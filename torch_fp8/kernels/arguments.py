"""The tuples of arguments that operators pass to their kernels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import BlockScaled
from torch_fp8.quantization.payload_shape import (
    Layouts,
    new_payload,
    new_scale,
    new_scales,
    padded_rows,
)
from torch_fp8.quantization.recipe import CastSpec


class CastOptions(NamedTuple):
    """The options for casting a matrix x (R, C) to FP8, shared by every operator that casts.

    Attributes:
        dtype: float8_e4m3fn or float8_e5m2.
        granularity: see `torch_fp8.quantization.recipe`.
        power_of_two: whether scales are rounded up to powers of two; implied by ``block_1x32``.
        rowwise: whether to return x quantized along C, (R, C).
        columnwise: whether to return x^T quantized along R, (C, R'); see
            `torch_fp8.quantization.payload_shape`.
        scale: () float32 dequantization scale for tensorwise, used unchanged; or None.
        amax: () float32 for tensorwise, or None. Without `scale`, an upper bound of |x|, from which
            the cast derives the scale. With `scale`, a slot (`raise_slot`) that the cast raises in
            place to the amax of x. Operator schemas do not declare that write, so graphs of
            torch.compile pass a slot only to operators whose kernels they see.
        after: a tensor that backward computes, the smaller the better, so that torch.compile cannot
            move the cast to forward when it partitions a graph; not read.
    """

    dtype: torch.dtype
    granularity: str
    power_of_two: bool
    rowwise: bool
    columnwise: bool
    scale: Tensor | None = None
    amax: Tensor | None = None
    after: Tensor | None = None

    @classmethod
    def of(
        cls,
        spec: CastSpec,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        after: Tensor | None = None,
        *,
        rowwise: bool,
        columnwise: bool,
    ) -> "CastOptions":
        """Build the options of a cast to the format and granularity of `spec`."""
        as_payload = (spec.format.dtype, spec.granularity, spec.power_of_two)
        return cls(*as_payload, rowwise, columnwise, scale, amax, after)

    @property
    def needs_amax(self) -> bool:
        """Whether the cast must compute the amax for its scale."""
        return self.granularity == "tensorwise" and self.scale is None and self.amax is None

    @property
    def raises_amax(self) -> bool:
        """Whether `amax` is a slot that the cast raises."""
        return self.scale is not None and self.amax is not None

    def transposed(self) -> "CastOptions":
        """Return the options that cast x^T to the same payloads, with the two layouts swapped."""
        return self._replace(rowwise=self.columnwise, columnwise=self.rowwise)

    def new_layouts(self, x: Tensor, cols: int | None = None, pads: bool = True) -> Layouts:
        """Allocate the payloads and scales of a cast of a result with x's rows.

        Args:
            x: (R, C), on the device of the result.
            cols: number of columns of the result, or None for C.
            pads: whether the column layout has room for padding.
        """
        rows, cols = x.shape[0], x.shape[1] if cols is None else cols
        granularity, by_tensor = self.granularity, self.granularity == "tensorwise"
        row = scale = col = col_scale = None
        if self.rowwise:
            row = new_payload(x, rows, cols, self.dtype, granularity)
            scale = None if by_tensor else new_scales(x, rows, cols, granularity)
        if self.columnwise:
            length = padded_rows(rows, granularity) if pads else rows
            col = x.new_empty((cols, length), dtype=self.dtype)
            col_scale = None if by_tensor else new_scales(x, cols, rows, granularity)
        if by_tensor and self.scale is None:
            scale = new_scale(x)
        return row, scale, col, col_scale

    def of_gradients(
        self, dup_scale: Tensor | None = None, dup_amax: Tensor | None = None
    ) -> tuple["CastOptions", "CastOptions"]:
        """Return the casts of SwiGLU's two gradients, dgate and dup.

        Args:
            dup_scale, dup_amax: scale and amax of dup, used if these options have a scale, which is
                then dgate's. Without a scale, `amax` of these options is (2,), for both, or None.
        """
        if self.scale is not None:
            return self, self._replace(scale=dup_scale, amax=dup_amax)
        of_dgate, of_dup = (None, None) if self.amax is None else (self.amax[0], self.amax[1])
        return self._replace(amax=of_dgate), self._replace(amax=of_dup)


EXPERT_ROWS = CastOptions(torch.float8_e4m3fn, "rowwise", True, rowwise=True, columnwise=False)
"""The cast of an expert's activation and of its gradient: by rows, with power-of-two scales."""


class StepScalars(NamedTuple):
    """The numbers of an optimizer step that are equal for all parameters of a group.

    Attributes:
        stream: `stream_state` of the step; with a matrix's number it gives its random words.
    """

    beta1_complement: float
    beta2: float
    beta2_complement: float
    step_size: float
    inv_sqrt_correction: float
    eps: float
    decay: float
    weight_decay: float
    maximize: bool
    stream: int


class GradientParts(NamedTuple):
    """An 8-bit gradient.

    Attributes:
        qdata: (R, K) uint8 codes.
        scale: (R, ceil(K / 32)) uint8 scales.
        multiplier: () float32 factor of all values.
    """

    qdata: Tensor
    scale: Tensor
    multiplier: Tensor


class WeightPayload(NamedTuple):
    """The E4M3 payload of a weight, in memory that the optimizer's step overwrites.

    Attributes:
        granularity: tensorwise or block_128x128.
        power_of_two: whether scales are rounded up to powers of two.
        qdata: (R, K) codes, as in `torch_fp8.ops.quantize.QuantizedTensor`.
        scale: float32 scale, () or (ceil(R / 128), ceil(K / 128)).
    """

    granularity: str
    power_of_two: bool
    qdata: Tensor
    scale: Tensor


class WeightMatrix(NamedTuple):
    """A parameter and its optimizer state as matrices that share its memory, updated in place.

    Attributes:
        weight: (R, K) contiguous; bfloat16, or float32 without residual.
        residual: (R, K) int8, as from `torch_fp8.quantization.split_float.split`, or None for a
            float32 weight, and a BF16 weight without residual.
        grad: (R, K) bfloat16 or float32 contiguous, or `GradientParts`.
        exp_avg, exp_avg_sq: moments, `MOMENT1` and `MOMENT2`.
        row, col: position of this shard's first element in the whole matrix.
        row_length: columns of the whole matrix.
        amax: () float32 that the step raises to the amax of the new weights for their next cast,
            NaN if a weight is NaN; or None if it is not computed.
        payload: FP8 payload that kernels write, or None. The reference does not write it, so its
            caller has to cast the weight.
        memo: list in which kernels cache what depends on the fields above except `grad`, or None.
        number: index of the parameter in its optimizer, which keys the random words.
    """

    weight: Tensor
    residual: Tensor | None
    grad: Tensor | GradientParts
    exp_avg: BlockScaled
    exp_avg_sq: BlockScaled
    row: int
    col: int
    row_length: int
    amax: Tensor | None = None
    payload: WeightPayload | None = None
    memo: list[Any] | None = None
    number: int = 0


class BackwardInputs(NamedTuple):
    """The arguments of SwiGLU's backward, for ``h = silu(gate) * up``.

    Legend: R rows (tokens), C columns (features). Tensors have any strides.

    Attributes:
        grad: (R, C) float32, bfloat16 or float16, the gradient of h.
        gate, up: (R, C), in full precision, or as saved in FP8 with their scales.
        gate_scale, up_scale: (R, ceil(C / 128)) float32, or None in full precision.
        out_dtype: the dtype of the gradients of gate and up.
    """

    grad: Tensor
    gate: Tensor
    gate_scale: Tensor | None
    up: Tensor
    up_scale: Tensor | None
    out_dtype: torch.dtype


class NormInputs(NamedTuple):
    """The arguments of an RMSNorm that computes its own statistics.

    Attributes:
        x: (R, C) float32, bfloat16 or float16, any strides.
        weight: (C,), any floating dtype.
        eps: constant added to the mean of squares.
        offset: constant added to the weight.
        out_dtype: the dtype of the norm's result.
    """

    x: Tensor
    weight: Tensor
    eps: float
    offset: float
    out_dtype: torch.dtype

    def with_rstd(self, rstd: Tensor) -> "NormWithRstd":
        """Return the arguments of the same norm with known statistics."""
        return NormWithRstd(self.x, self.weight, rstd, self.offset, self.out_dtype)


class NormWithRstd(NamedTuple):
    """The arguments of an RMSNorm with known statistics: `NormInputs` with rstd instead of eps.

    Attributes:
        rstd: (R,) float32, ``1 / sqrt(mean(x^2) + eps)``.
    """

    x: Tensor
    weight: Tensor
    rstd: Tensor
    offset: float
    out_dtype: torch.dtype


class NormBackwardInputs(NamedTuple):
    """The arguments of an RMSNorm's backward.

    Attributes:
        grad: (R, C) float32, bfloat16 or float16, the gradient of the result.
        x: (R, C) input of the norm, in full precision, or as saved in FP8 with `x_scale`.
        x_scale: (R, ceil(C / 128)) float32, or None in full precision.
        weight, rstd, offset: see `NormWithRstd`.
        dx_dtype: the dtype of the gradient of x.
        weight_grad: whether to compute dw.
    """

    grad: Tensor
    x: Tensor
    x_scale: Tensor | None
    weight: Tensor
    rstd: Tensor
    offset: float
    dx_dtype: torch.dtype
    weight_grad: bool


class GateForm(NamedTuple):
    """``gate * sigmoid(alpha * gate) * up``, or the clamped form of GPT-OSS.

    Attributes:
        interleaved: whether a row alternates gate and up; else all of gate comes first.
        clamped: whether gate <= limit, -limit <= up <= limit, and the factor is up + 1.
        alpha: factor of gate in the sigmoid; 1 unless clamped.
        limit: bound of the clamped form, positive there.
    """

    interleaved: bool = False
    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0


class GateBackwardInputs(NamedTuple):
    """The tensors of the backward of the gated activation of experts.

    Legend: R rows of all experts, I expert width.

    Attributes:
        grad: (R, I) float32, bfloat16 or float16, contiguous: the gradient of a.
        score: (R,) float32.
        gate, up: (R, I) E4M3, as saved by ``expert_gate_quantize``.
        gate_scale, up_scale: (R, ceil(I / 128)) float32.
    """

    grad: Tensor
    score: Tensor
    gate: Tensor
    gate_scale: Tensor
    up: Tensor
    up_scale: Tensor
