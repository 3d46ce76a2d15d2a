"""Casting to FP8 and back: `QuantizedTensor`, `quantize`, `dequantize`.

One operator, ``torch_fp8::quantize_2d``, does every cast. It reads a matrix once and writes the
requested layouts: rowwise, quantized along the last dimension, and columnwise, the transpose,
quantized along *its* last dimension. On the CPU it is plain torch; on CUDA it is Triton kernels
that write the same bytes.

What a cast reads and writes, in bytes per element of a BF16 matrix, both layouts:

| scale | bytes | launches | why |
|---|---|---|---|
| tensorwise, scale or amax given | 4 | 1 | |
| blocks | 4, and 4 / 128 for each layout's scales of 1x128 | 1 | a tile holds whole blocks |
| tensorwise | 6 | 2 | its amax takes a separate read |
| rowwise | 8 | 3 | rows are read once; no tile holds whole columns, so they are read twice |

With delayed scaling the scale is given, and the cast also raises the recorded amax to that of its
input.

The gradient of a bias, ``g.sum(0)``, is computed by the cast that reads the gradient g anyway
(``torch_fp8::quantize_2d_sum``). On CUDA each tile stores the sums of its 128 rows, a hundredth of
the bytes of g, and one more launch adds these in an order that depends only on the shape.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.autograd.current_pass import stand_in
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.registry import operator
from torch_fp8.ops.transpose import transposed_bytes
from torch_fp8.quantization.formats import E4M3, Format, format_of
from torch_fp8.quantization.payload_shape import (
    BLOCK_SHAPE,
    SQUARE,
    Layouts,
    new_group_scales,
    padded_rows,
    scale_shape,
)
from torch_fp8.quantization.recipe import CastSpec, Granularity
from torch_fp8.quantization.scaling import raise_slot, scale_from_amax, tensor_amax


class QuantizedTensor(NamedTuple):
    """A matrix in FP8, ``x ~= qdata.float() * scale``; torch operations on the tuple fail.

    Attributes:
        qdata: (R, C) FP8, contiguous.
        scale: float32 dequantization scale: () tensorwise; (R, 1) rowwise; (R, ceil(C / 128)) for
            block_1x128, stored block by block as the GEMM needs them; (ceil(R / 128), ceil(C /
            128)) for block_128x128; (R, ceil(C / 32)) for block_1x32, always powers of two.
        granularity: the elements that share a scale.
    """

    qdata: Tensor
    scale: Tensor
    granularity: Granularity


Payloads = tuple[QuantizedTensor | None, QuantizedTensor | None]
"""A matrix (R, C) quantized along C, and its transpose (C, R) quantized along R, or None if not
computed.
"""


def quantize(
    x: Tensor, spec: CastSpec, scale: Tensor | None = None, after: Tensor | None = None
) -> QuantizedTensor:
    """Cast x to FP8 along its last dimension, so that ``x ~= qdata.float() * scale``.

    Finite overflow saturates, and NaN stays NaN. An infinite element makes all elements that share
    its scale NaN; with a given scale only the element itself becomes NaN in E4M3, and stays
    infinite in E5M2.

    Args:
        x: (R, C) float32, bfloat16 or float16, any strides.
        spec: format and granularity.
        scale: () float32 dequantization scale for tensorwise, or None to compute it from the amax
            of x.
        after: see `CastOptions`.
    """
    options = CastOptions.of(spec, scale, after=after, rowwise=True, columnwise=False)
    rowwise, _ = quantize_layouts(x, options)
    assert rowwise is not None
    return rowwise


def quantize_stacked(x: Tensor, spec: CastSpec, after: Tensor | None = None) -> QuantizedTensor:
    """Cast x (..., C) to FP8 along its last dimension; `spec` is rowwise unless x is a matrix."""
    if x.ndim == 2:
        return quantize(x, spec, after=after)
    assert spec.granularity == "rowwise"
    row = quantize(x.reshape(-1, x.shape[-1]), spec, after=after)  # (E, R, C) -> (E R, C)
    return row._replace(qdata=row.qdata.view(x.shape), scale=row.scale.view(*x.shape[:-1], 1))


def quantize_layouts(x: Tensor, options: CastOptions) -> Payloads:
    """Cast x and its transpose in one read.

    Args:
        x: (R, C) float32, bfloat16 or float16, any strides.
        options: the cast. A missing tensorwise scale is computed from the amax; a given amax saves
            a read of x.
    Returns:
        ``(rowwise, columnwise)``, None for a layout that was not requested. Tensorwise, both share
        one scale.
    """
    return as_layouts(quantize_2d(x, options), options)


def quantize_layouts_and_sum(
    x: Tensor, options: CastOptions, sum_dtype: torch.dtype
) -> tuple[Payloads, Tensor]:
    """Cast as `quantize_layouts`; also sum rows, (C,), rounded from float32 once."""
    *layouts, sums = quantize_2d_sum(x, options, sum_dtype)
    return as_layouts(layouts, options), sums


def as_layouts(results: Sequence[Any], options: CastOptions) -> Payloads:
    """Turn an operator's ``(qdata, scale, qdata_t, scale_t)`` into two payloads.

    Args:
        results: the result of `quantize_2d`.
        options: the options of that call.
    """
    qdata, scale, qdata_t, scale_t = results
    granularity: Any = options.granularity
    # In a trace, the cast of a producer's result may return another reader's scale.
    if options.scale is not None and (scale is None or scale.ndim):
        scale = options.scale
    if granularity == "tensorwise":
        scale_t = scale
    return (
        QuantizedTensor(qdata, scale, granularity) if options.rowwise else None,
        QuantizedTensor(qdata_t, scale_t, granularity) if options.columnwise else None,
    )


def dequantize(x: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute ``qdata.float() * scale``, (R, C), rounded to `dtype`."""
    scale = x.scale
    if x.granularity in BLOCK_SHAPE:
        rows, cols = x.qdata.shape
        block_rows, block_cols = BLOCK_SHAPE[x.granularity]
        scale = scale.repeat_interleave(block_rows, 0)[:rows]
        scale = scale.repeat_interleave(block_cols, 1)[:, :cols]
    return (x.qdata.float() * scale).to(dtype)


def transposed(x: QuantizedTensor, after: Tensor | None = None) -> QuantizedTensor | None:
    """Return x^T, (C, R) contiguous, with the same codes, or None if its scales would differ.

    The scales are the same if each covers as many rows as columns.

    Args:
        x: (R, C).
        after: a tensor that backward computes; a compiled graph then transposes in backward, and
            forward saves no transpose.
    """
    if x.granularity not in SQUARE:
        return None
    # (R / 128, C / 128) -> (C / 128, R / 128)
    scale = x.scale.t().contiguous() if x.scale.ndim else x.scale
    rows = x.qdata.shape[0]
    columns = padded_rows(rows, x.granularity) if after is None else rows
    return QuantizedTensor(transposed_bytes(x.qdata, columns, after), scale, x.granularity)


def cast_saturating(x: Tensor, scale: Tensor, format: Format) -> Tensor:
    """Round ``x / scale`` to FP8: to nearest even, finite overflow saturated, NaN kept.

    An infinite x gives NaN in E4M3 and infinity in E5M2. `.to(float8_e4m3fn)` alone would turn an
    infinity into 448 and so hide a diverged gradient; `.to(float8_e5m2)` overflows to infinity.

    Args:
        x, scale: float32, broadcastable.
    """
    nonfinite = x - x  # 0 for finite x, NaN otherwise
    if format.has_inf:
        nonfinite = torch.where(x.isinf(), x, nonfinite)
    return ((x / scale).clamp(-format.max, format.max) + nonfinite).to(format.dtype)


def _quantize_rows(
    x: Tensor, format: Format, granularity: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Quantize x (R, C) float32 along C to a contiguous payload (R, C) and its scale."""
    if granularity == "rowwise":
        amax = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
        scale = scale_from_amax(amax, format, power_of_two)
        return cast_saturating(x, scale, format).contiguous(), scale
    return _quantize_blocks(x, BLOCK_SHAPE[granularity], format, power_of_two)


def _quantize_blocks(
    x: Tensor, block: tuple[int, int], format: Format, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    num_rows, num_cols = (-(-size // n) for size, n in zip((rows, cols), block, strict=True))
    padded = F.pad(x, (0, num_cols * block[1] - cols, 0, num_rows * block[0] - rows))
    # (R, C) -> (rows of blocks, rows in one, columns of blocks, columns in one)
    blocks = padded.reshape(num_rows, block[0], num_cols, block[1])
    amax = blocks.abs().amax((1, 3)) if x.numel() else x.new_zeros(num_rows, num_cols)
    scale = scale_from_amax(amax, format, power_of_two)
    qdata = cast_saturating(blocks, scale[:, None, :, None], format)
    qdata = qdata.reshape(num_rows * block[0], num_cols * block[1])[:rows, :cols]  # (R, C)
    return qdata.contiguous(), scale


@operator(lambda x, options: options.new_layouts(x))
def quantize_2d(x: Tensor, options: CastOptions) -> Layouts:
    """Cast x and its transpose.

    Args:
        x: (R, C), any strides.
        options: the cast; an amax given with a scale is raised to that of x.
    Returns:
        See `Layouts`. All are contiguous, except scales of block_1x128, which `new_group_scales`
        lays out.
    """
    format, granularity = format_of(options.dtype), options.granularity
    more = padded_rows(x.shape[0], granularity) - x.shape[0]
    if granularity == "tensorwise":
        new_scale, scale, amax = None, options.scale, options.amax
        if scale is None:
            amax = tensor_amax(x) if amax is None else amax
            scale = new_scale = scale_from_amax(amax, format, options.power_of_two)
        elif amax is not None:
            raise_slot(amax, tensor_amax(x))
        qdata = cast_saturating(x.float(), scale, format)
        row = qdata.contiguous() if options.rowwise else None
        col = transposed_bytes.reference(qdata, x.shape[0] + more) if options.columnwise else None
        return row, new_scale, col, None

    def one(matrix: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
        if not wanted:
            return None, None
        qdata, scale = _quantize_rows(matrix.float(), format, granularity, options.power_of_two)
        if granularity == "block_1x128":
            scale = new_group_scales(scale, *qdata.shape).copy_(scale)
        return qdata, scale

    columns = F.pad(x.t(), (0, more)) if more else x.t()  # (C, R), zeros after the tokens
    return (*one(x, options.rowwise), *one(columns, options.columnwise))


LayoutsPlus = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]
"""`Layouts`, and one more result."""


@operator(lambda x, options, dtype: (*options.new_layouts(x), x.new_empty(x.shape[1], dtype=dtype)))
def quantize_2d_sum(x: Tensor, options: CastOptions, sum_dtype: torch.dtype) -> LayoutsPlus:
    """Cast as `quantize_2d`, and sum the rows; the kernel adds in another order."""
    sums = x.sum(0, dtype=torch.float32).to(sum_dtype)
    return (*quantize_2d.reference(x, options), sums)


SAVED: Granularity = "block_1x128"
"""The granularity of tensors saved for backward: E4M3 along C with power-of-two scales (COAT's
groups, arXiv 2410.19313 section 4, with Hopper's block length).
"""


def save_input(x: Tensor, wanted: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """Return x as saved for backward: E4M3 (R, C) and scale (R, ceil(C / 128)), or None if not
    wanted.
    """
    q, s, *_ = quantize_2d(x, CastOptions(E4M3.dtype, SAVED, True, wanted, False))
    return q, s


def save_inputs(wanted: bool, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    """Return the results of `save_input` of each input in turn."""
    return tuple(t for x in inputs for t in save_input(x, wanted))


def saved_stand_ins(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return placeholders for the results of `save_input`, (R, C), if nothing is saved."""
    shape = scale_shape(x.shape[0], x.shape[1], SAVED)
    return stand_in(x.shape, E4M3.dtype, x), stand_in(shape, torch.float32, x)


def saved_values(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return a saved tensor (FP8 with its scale, or plain with None) as float32 (R, C)."""
    return x.float() if scale is None else dequantize(QuantizedTensor(x, scale, SAVED))
