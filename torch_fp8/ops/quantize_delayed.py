"""Casts with delayed scaling: the scale comes from past amaxes, so one read does everything.

``torch_fp8::quantize_2d_delayed`` casts a matrix in both layouts with the scale that its history
suggests, takes the amax on its way and records it in the history: on CUDA in one launch, 4 bytes
per element of a BF16 matrix. Producers likewise cast what they make with the scale that a history
suggests, and take the amax. ``torch_fp8::advance_history`` does the rest where the amax is known
already, from a producer or from a group of ranks.

The rules are those of `torch_fp8.quantization.scaling`: `delayed_scale` and `push_amax`. While a
history is empty, the scale is that of the matrix at hand; on CUDA nobody waits on the host to learn
whether it is (see `torch_fp8.kernels.quantize_delayed`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fp8.config import FP8Config
from torch_fp8.ops.fused_quantize import DelayedCast
from torch_fp8.ops.quantize import (
    QuantizedTensor,
    emulates_casts,
    quantize_2d_reference,
)
from torch_fp8.ops.registry import define, operators
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.payload_shape import padded_rows
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import delayed_scale, push_amax, tensor_amax


class History(NamedTuple):
    """The amax history of one operand under delayed scaling; all its tensors are written in place.

    Attributes:
        amaxes: (H,) float32, the most recent first; 0 where nothing was recorded yet. The sign bit
            says that an outlier was left out (`push_amax`).
        progress: (2,) int32, of a launch that runs; zeros otherwise.
        last: () float32, the scale that was used last; None where nobody asks for it.
    """

    amaxes: Tensor
    progress: Tensor
    last: Tensor | None = None

    def cast(
        self,
        x: Tensor,
        spec: CastSpec,
        config: FP8Config,
        *,
        row: bool,
        col: bool,
        sum_dtype: torch.dtype | None = None,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None]:
        """Cast x and its transpose in one read, and record the amax of x.

        Args:
            x: (R, C) float32, bfloat16 or float16, any strides.
            spec: format; tensorwise.
            config: the algorithm and margin of delayed scaling.
            row, col: the layouts to make; neither: the amax is recorded alone.
            sum_dtype: dtype of ``x.sum(0)``, added up in float32; None: not wanted.
        Returns:
            ``(row, col, sums)``, None for what was not asked for.
        """
        qdata, scale, qdata_t, sums = operators.quantize_2d_delayed(
            x,
            *self,
            spec.format.dtype,
            config.amax_compute_algo,
            config.margin,
            row,
            col,
            sum_dtype,
        )
        return (
            QuantizedTensor(qdata, scale, spec.granularity) if row else None,
            QuantizedTensor(qdata_t, scale, spec.granularity) if col else None,
            None if sum_dtype is None else sums,
        )

    def casts(self, spec: CastSpec, config: FP8Config, *, row: bool, col: bool) -> DelayedCast:
        """Return the cast that a producer fuses, with the scale that this history suggests.

        Args:
            spec, config, row, col: see `cast`.
        """
        algorithm, margin = config.amax_compute_algo, config.margin
        return DelayedCast(
            self.amaxes, self.progress, spec.format.dtype, algorithm, margin, row, col
        )

    @staticmethod
    def of_operand(buffers: tuple[Tensor, ...], operand: int) -> "History":
        """The part of a layer's buffers that belongs to input (0), weight (1) or gradient (2).

        Args:
            buffers: amaxes (2, H), progress (2, 2) and last scales (2,) of input and weight, amaxes
                (H,) and progress (2,) of the gradient. These are apart, for torch.compile gives
                backward the values that a tensor had after its own forward, if both write to it.
        """
        amaxes, progress, last, grad_amaxes, grad_progress = buffers
        if operand == 2:
            return History(grad_amaxes, grad_progress)
        return History(amaxes[operand], progress[operand], last[operand])

    def is_same(self, other: "History") -> bool:
        """Return whether both are one history: views of the same memory."""
        return same_memory(self.amaxes, other.amaxes)

    def advance(self, amax: Tensor, spec: CastSpec, config: FP8Config) -> Tensor:
        """Return the () scale for a matrix with this amax (() float32), and record the amax."""
        scale: Tensor = operators.advance_history(
            self.amaxes,
            self.last,
            amax,
            spec.format.dtype,
            config.amax_compute_algo,
            config.margin,
        )
        return scale


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two histories of amaxes share their memory."""
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and a.storage_offset() == b.storage_offset()


def advance_history_reference(
    amaxes: Tensor,
    last: Tensor | None,
    amax: Tensor,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
) -> Tensor:
    """Reference of ``torch_fp8::advance_history``.

    Args:
        amaxes, last: tensors of a `History`; written.
        amax: () float32.
        dtype: FP8 dtype of the payload.
        algorithm, margin: see `delayed_scale`.
    Returns:
        () float32 dequantization scale.
    """
    scale = delayed_scale(amaxes, amax, format_of(dtype), algorithm, margin)
    push_amax(amaxes, amax, algorithm)
    if last is not None:
        last.copy_(scale)
    return scale


def quantize_2d_delayed_reference(
    x: Tensor,
    amaxes: Tensor,
    progress: Tensor,
    last: Tensor | None,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
    row: bool,
    col: bool,
    sum_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference of ``torch_fp8::quantize_2d_delayed``; the kernel adds up in another order.

    Args:
        x: (R, C), any strides.
        amaxes, progress, last: tensors of a `History`; written, but for `progress`.
        dtype, algorithm, margin: see `advance_history_reference`.
        row, col: the layouts to make.
        sum_dtype: the dtype of the sums; None: not wanted.
    Returns:
        qdata (R, C), scale (), qdata of x^T (C, R'), ``x.sum(0)``; empty if not asked for.
    """
    del progress
    scale = advance_history_reference(amaxes, last, tensor_amax(x), dtype, algorithm, margin)
    qdata, _, qdata_t, _ = quantize_2d_reference(x, scale, dtype, "tensorwise", False, row, col)
    sums = _no_sums(x)
    if sum_dtype is not None:
        sums = x.sum(0, dtype=torch.float32).to(sum_dtype)
    return qdata, scale, qdata_t, sums


def _no_sums(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


def _quantize_2d_delayed_cuda(
    x: Tensor,
    amaxes: Tensor,
    progress: Tensor,
    last: Tensor | None,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
    row: bool,
    col: bool,
    sum_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if emulates_casts(x.device) or x.numel() == 0:
        return quantize_2d_delayed_reference(
            x, amaxes, progress, last, dtype, algorithm, margin, row, col, sum_dtype
        )
    from torch_fp8.kernels.column_sums import TileSums
    from torch_fp8.kernels.quantize_delayed import quantize_2d_delayed

    sums = None if sum_dtype is None else TileSums()
    qdata, scale, qdata_t = quantize_2d_delayed(
        x, amaxes, progress, last, dtype, algorithm, margin, row, col, sums
    )
    return (
        x.new_empty(0, dtype=dtype) if qdata is None else qdata,
        scale,
        x.new_empty(0, dtype=dtype) if qdata_t is None else qdata_t,
        _no_sums(x) if sums is None or sum_dtype is None else sums.total(x, sum_dtype),
    )


def _quantize_2d_delayed_fake(
    x: Tensor,
    amaxes: Tensor,
    progress: Tensor,
    last: Tensor | None,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
    row: bool,
    col: bool,
    sum_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    return (
        x.new_empty((rows, cols) if row else (0,), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((cols, padded_rows(rows, "tensorwise")) if col else (0,), dtype=dtype),
        _no_sums(x) if sum_dtype is None else x.new_empty(cols, dtype=sum_dtype),
    )


def _advance_history_cuda(
    amaxes: Tensor,
    last: Tensor | None,
    amax: Tensor,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
) -> Tensor:
    if emulates_casts(amaxes.device):
        return advance_history_reference(amaxes, last, amax, dtype, algorithm, margin)
    from torch_fp8.kernels.quantize_delayed import advance_history

    return advance_history(amaxes, last, amax, dtype, algorithm, margin)


def _advance_history_fake(
    amaxes: Tensor,
    last: Tensor | None,
    amax: Tensor,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
) -> Tensor:
    return torch.empty_like(amax)


define(
    "quantize_2d_delayed(Tensor x, Tensor(a!) amaxes, Tensor(b!) progress, Tensor(c!)? last, "
    "ScalarType dtype, str algorithm, int margin, bool row, bool col, ScalarType? sum_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    quantize_2d_delayed_reference,
    _quantize_2d_delayed_cuda,
    _quantize_2d_delayed_fake,
)
define(
    "advance_history(Tensor(a!) amaxes, Tensor(b!)? last, Tensor amax, ScalarType dtype, "
    "str algorithm, int margin) -> Tensor",
    advance_history_reference,
    _advance_history_cuda,
    _advance_history_fake,
)
