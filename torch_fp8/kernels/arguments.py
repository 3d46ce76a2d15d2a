"""Tuples of arguments that operators hand to their kernels."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import BlockScaled
from torch_fp8.quantization.payload_shape import (
    Layouts,
    new_payload,
    new_scales,
    padded_rows,
)
from torch_fp8.quantization.ratio_int4 import RatioInt4
from torch_fp8.quantization.recipe import CastSpec


class CastOptions(NamedTuple):
    """How a matrix x (R, C) is cast to FP8; the arguments of every operator that casts.

    Attributes:
        dtype: float8_e4m3fn or float8_e5m2.
        granularity: see `torch_fp8.quantization.recipe`.
        power_of_two: whether scales are rounded up to powers of two; implied by ``block_1x32``.
        rowwise: whether to make x quantized along C, (R, C).
        columnwise: whether to make x^T quantized along R, (C, R'); see
            `torch_fp8.quantization.payload_shape`.
        scale: () float32 dequantization scale, for tensorwise, used as it is; or None.
        amax: () float32 or None, for tensorwise. Without a scale: at least the amax of x, from
            which the scale is made. Beside a scale: a slot, 0 or more or NaN, which is raised in
            place to the amax of x. Schemas do not declare that write: inside a graph of
            torch.compile no slot is given, and what nobody reads can be dropped.
    """

    dtype: torch.dtype
    granularity: str
    power_of_two: bool
    rowwise: bool
    columnwise: bool
    scale: Tensor | None = None
    amax: Tensor | None = None

    @classmethod
    def of(
        cls,
        spec: CastSpec,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        *,
        rowwise: bool,
        columnwise: bool,
    ) -> "CastOptions":
        """Build the options of a cast with format and granularity of `spec`."""
        how = (spec.format.dtype, spec.granularity, spec.power_of_two)
        return cls(*how, rowwise, columnwise, scale, amax)

    @property
    def needs_amax(self) -> bool:
        """Whether the scale is made from an amax that is not given."""
        return self.granularity == "tensorwise" and self.scale is None and self.amax is None

    @property
    def raises_amax(self) -> bool:
        """Whether `amax` is a slot, which the cast raises."""
        return self.scale is not None and self.amax is not None

    def transposed(self) -> "CastOptions":
        """Return the options with which x^T is cast to the same payloads, in the other order."""
        return self._replace(rowwise=self.columnwise, columnwise=self.rowwise)

    def new_layouts(self, x: Tensor, cols: int | None = None) -> Layouts:
        """Allocate what a cast of a result with x's rows returns.

        Args:
            x: (R, C), on the device of the result.
            cols: the columns of the result; None: C.
        """
        rows, cols = x.shape[0], x.shape[1] if cols is None else cols
        by_row: tuple[Tensor | None, Tensor | None] = (None, None)
        by_col, by_tensor = by_row, self.granularity == "tensorwise"
        how = (self.dtype, self.granularity)
        if self.rowwise:
            scale = None if by_tensor else new_scales(x, rows, cols, self.granularity)
            by_row = new_payload(x, rows, cols, *how), scale
        if self.columnwise:
            scale = None if by_tensor else new_scales(x, cols, rows, self.granularity)
            size = (cols, padded_rows(rows, self.granularity))
            by_col = x.new_empty(size, dtype=self.dtype), scale
        if by_tensor and self.scale is None:
            by_row = by_row[0], x.new_empty((), dtype=torch.float32)
        return (*by_row, *by_col)

    def of_gradients(
        self, dup_scale: Tensor | None = None, dup_amax: Tensor | None = None
    ) -> tuple["CastOptions", "CastOptions"]:
        """Return the casts of SwiGLU's two gradients, dgate and dup.

        Args:
            dup_scale, dup_amax: dup's, where these options have the scale of dgate; without one,
                their amax is (2,), of both, or None.
        """
        if self.scale is not None:
            return self, self._replace(scale=dup_scale, amax=dup_amax)
        of_dgate, of_dup = (None, None) if self.amax is None else (self.amax[0], self.amax[1])
        return self._replace(amax=of_dgate), self._replace(amax=of_dup)


class StepScalars(NamedTuple):
    """The numbers of an optimizer step that are equal for all elements of a parameter.

    Attributes:
        keys: the keys of its random words.
        first_keys, first_turn: the keys and the turn of the thresholds of a first moment in 4 bits
            (`torch_fp8.quantization.linear_int8.threshold_keys`).
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
    keys: tuple[int, int]
    first_keys: tuple[int, int] = (0, 0)
    first_turn: int = 0


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
        exp_avg: the first moment, `MOMENT1`, or in 4 bits with the tensors of `exp_avg_sq`.
        exp_avg_sq: the second moment, `MOMENT2`.
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
    exp_avg: BlockScaled | RatioInt4
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


class NormInputs(NamedTuple):
    """The arguments of an RMSNorm that finds its own statistics.

    Attributes:
        x: (R, C) float32, bfloat16 or float16, any strides.
        weight: (C,), any floating dtype.
        eps: added to the mean of squares.
        offset: added to the weight.
        out_dtype: the dtype of the norm's result.
    """

    x: Tensor
    weight: Tensor
    eps: float
    offset: float
    out_dtype: torch.dtype

    def with_rstd(self, rstd: Tensor) -> "NormWithRstd":
        """Return the arguments of the same norm, whose statistics are known."""
        return NormWithRstd(self.x, self.weight, rstd, self.offset, self.out_dtype)


class NormWithRstd(NamedTuple):
    """The arguments of an RMSNorm whose statistics are known: `NormInputs`, but for rstd.

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
        x: (R, C): what was normalized, or, with `x_scale`, the FP8 that was saved of it.
        x_scale: (R, ceil(C / 128)) float32 or None.
        weight, rstd, offset: see `NormWithRstd`.
        dx_dtype: the dtype of the gradient of x.
        weight_grad: whether dw is wanted.
    """

    grad: Tensor
    x: Tensor
    x_scale: Tensor | None
    weight: Tensor
    rstd: Tensor
    offset: float
    dx_dtype: torch.dtype
    weight_grad: bool
