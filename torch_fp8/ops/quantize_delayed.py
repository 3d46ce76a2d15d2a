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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.config import FP8Config
from torch_fp8.kernels.arguments import DelayedCastOptions
from torch_fp8.ops.quantize import QuantizedTensor, quantize_2d
from torch_fp8.ops.registry import emulates_casts, operator
from torch_fp8.quantization.formats import format_of
from torch_fp8.quantization.payload_shape import Layouts
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import delayed_scale, push_amax, tensor_amax

EXTRA = 4
"""The words of a history that are no amaxes, see `History.of_row`."""


class History(NamedTuple):
    """The amax history of one operand under delayed scaling; all its tensors are written in place.

    Attributes:
        amaxes: (H,) float32, the most recent first; 0 where nothing was recorded yet. The sign bit
            says that an outlier was left out (`push_amax`).
        progress: (2,) words of a launch that runs; zeros otherwise.
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
        rowwise: bool,
        columnwise: bool,
        sum_dtype: torch.dtype | None = None,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None]:
        """Cast x and its transpose in one read, and record the amax of x.

        Args:
            x: (R, C) float32, bfloat16 or float16, any strides.
            spec: format; tensorwise.
            config: the algorithm and margin of delayed scaling.
            rowwise, columnwise: the layouts to make; neither: the amax is recorded alone.
            sum_dtype: dtype of ``x.sum(0)``, added up in float32; None: not wanted.
        Returns:
            ``(rowwise, columnwise, sums)``, None for what was not asked for.
        """
        options = self.options(spec, config, rowwise=rowwise, columnwise=columnwise)
        made = quantize_2d_delayed(x, options, self.last, sum_dtype)
        row = QuantizedTensor(made[0], made[1], "tensorwise") if rowwise else None
        col = QuantizedTensor(made[2], made[1], "tensorwise") if columnwise else None
        return row, col, None if sum_dtype is None else made[3]

    def options(
        self, spec: CastSpec, config: FP8Config, *, rowwise: bool, columnwise: bool
    ) -> DelayedCastOptions:
        """Return the cast with the scale that this history suggests, for a producer to fuse.

        Args:
            spec, config, rowwise, columnwise: see `cast`.
        """
        how = (spec.format.dtype, config.amax_compute_algo, config.margin)
        return DelayedCastOptions(self.amaxes, self.progress, *how, rowwise, columnwise)

    @staticmethod
    def of_row(row: Tensor, *, last: bool = False) -> "History":
        """The history that a layer keeps in one tensor.

        Args:
            row: (H + `EXTRA`,) float32, 16 bytes times something from where others begin: the
                amaxes, the last scale, a word that nobody uses, and progress.
            last: whether the last scale is asked for.
        """
        length = row.shape[0] - EXTRA
        return History(
            row.narrow(0, 0, length),
            row.narrow(0, length + 2, 2),
            row.select(0, length) if last else None,
        )

    @staticmethod
    def of_operand(buffers: tuple[Tensor, ...], operand: int) -> "History":
        """The part of a layer's buffers that belongs to input (0), weight (1) or gradient (2).

        Args:
            buffers: the rows of input and weight, (2, H + `EXTRA`), and that of the gradient. They
                are apart, for torch.compile gives backward the values that a tensor had after its
                own forward, if both write to it.
        """
        operands, of_gradient = buffers
        if operand == 2:
            return History.of_row(of_gradient)
        return History.of_row(operands[operand], last=True)

    def copy(self) -> "History":
        """Return the same history, to be advanced in vain."""
        return History(self.amaxes.clone(), torch.zeros_like(self.progress))

    def is_same(self, other: "History") -> bool:
        """Return whether both are one history: views of the same memory."""
        return same_memory(self.amaxes, other.amaxes)

    def advance(self, amax: Tensor, spec: CastSpec, config: FP8Config) -> Tensor:
        """Return the () scale for a matrix with this amax (() float32), and record the amax."""
        how = (spec.format.dtype, config.amax_compute_algo, config.margin)
        return advance_history(self.amaxes, self.last, amax, *how)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two histories of amaxes share their memory."""
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and a.storage_offset() == b.storage_offset()


def quantize_2d_delayed_cuda(
    x: Tensor, options: DelayedCastOptions, last: Tensor | None, sum_dtype: torch.dtype | None
) -> Layouts:
    """Return what `quantize_2d_delayed` does on CUDA: its launcher."""
    if emulates_casts(x.device) or x.numel() == 0:
        return quantize_2d_delayed.reference(x, options, last, sum_dtype)
    from torch_fp8.kernels import quantize_delayed
    from torch_fp8.kernels.column_sums import TileSums

    sums = None if sum_dtype is None else TileSums()
    qdata, scale, qdata_t = quantize_delayed.quantize_2d_delayed(x, options, last, sums)
    total = None if sums is None or sum_dtype is None else sums.total(x, sum_dtype)
    return qdata, scale, qdata_t, total


def _quantize_2d_delayed_fake(
    x: Tensor, options: DelayedCastOptions, last: Tensor | None, sum_dtype: torch.dtype | None
) -> Layouts:
    qdata, scale, qdata_t, _ = options.with_scale(None).new_layouts(x)
    sums = None if sum_dtype is None else x.new_empty(x.shape[1], dtype=sum_dtype)
    return qdata, scale, qdata_t, sums


def _kernels() -> Any:
    from torch_fp8.kernels import quantize_delayed

    return quantize_delayed


def _advance_history_fake(amaxes: Tensor, last: Tensor | None, amax: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(amax)


@operator(_advance_history_fake, _kernels, mutates=("amaxes", "last"))
def advance_history(
    amaxes: Tensor,
    last: Tensor | None,
    amax: Tensor,
    dtype: torch.dtype,
    algorithm: str,
    margin: int,
) -> Tensor:
    """Return the scale that a history suggests, and record the amax of the tensor at hand.

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


@operator(
    _quantize_2d_delayed_fake,
    cuda=quantize_2d_delayed_cuda,
    mutates=("amaxes", "progress", "last"),
)
def quantize_2d_delayed(
    x: Tensor, options: DelayedCastOptions, last: Tensor | None, sum_dtype: torch.dtype | None
) -> Layouts:
    """Cast x with the scale that a history suggests, and record its amax.

    Args:
        x: (R, C), any strides.
        options: how; the history is written here.
        last: () float32 that receives the scale, or None.
        sum_dtype: the dtype of the sums; None: not wanted.
    Returns:
        qdata (R, C), scale (), qdata of x^T (C, R'), ``x.sum(0)``; None if not asked for. The
        kernel adds up in another order.
    """
    how = options.dtype, options.algorithm, options.margin
    scale = advance_history.reference(options.amaxes, last, tensor_amax(x), *how)
    qdata, _, qdata_t, _ = quantize_2d.reference(x, options.with_scale(scale))
    sums = None
    if sum_dtype is not None:
        sums = x.sum(0, dtype=torch.float32).to(sum_dtype)
    return qdata, scale, qdata_t, sums
