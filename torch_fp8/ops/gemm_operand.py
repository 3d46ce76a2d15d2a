"""Operands of the scaled matmul as the CUDA operator takes them: padded, with scales laid out.

Sizes that tensor cores do not take are filled up with zeros, which add nothing to a sum.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.ops.alignment import aligned, is_aligned
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.quantization.payload_shape import BLOCK_SHAPE, E8M0_ROWS


def operand(
    x: QuantizedTensor, contracted: int, *, is_b: bool, row_multiple: int = 1
) -> QuantizedTensor:
    """Return x with payload padded and scales laid out as the CUDA operator takes them.

    The contraction dimension goes to a multiple of 16, with block scales of 128 to one of 128; the
    rows of b, and of a with block scales, to one of 16, with square blocks to one of 128. The
    scales of the padding are 1. Where the casts have padded tokens, nothing is left to do.

    Args:
        x: (R, C), or with more columns, which are zeros.
        contracted: C.
        is_b: whether it is the second operand.
        row_multiple: power of two of which the rows become a multiple, if that is more.
    """
    blocks_of_128 = x.granularity in ("block_1x128", "block_128x128")
    col_multiple = 128 if blocks_of_128 else GEMM_ALIGNMENT
    if x.granularity == "block_128x128":
        row_multiple = max(row_multiple, 128)
    elif is_b or blocks_of_128:
        row_multiple = max(row_multiple, GEMM_ALIGNMENT)
    rows, cols = x.qdata.shape
    qdata, scale = x.qdata, x.scale
    more_rows, more_cols = -rows % row_multiple, contracted + -contracted % col_multiple - cols
    if more_rows and not more_cols and x.granularity == "block_1x128":
        there = _with_rows_behind(x, rows + more_rows)
        if there is not None:
            return there
    if more_rows or more_cols:
        qdata = _pad_payload(qdata, more_rows, more_cols)
    elif scale.ndim == 0:
        return x
    if x.granularity == "rowwise":
        scale = _pad(scale, qdata.shape[0] - rows, 0, 1.0)  # (R, 1)
    elif x.granularity in BLOCK_SHAPE:
        block_rows, block_cols = BLOCK_SHAPE[x.granularity]
        num_rows, num_cols = -(-qdata.shape[0] // block_rows), -(-qdata.shape[1] // block_cols)
        scale = _pad(scale, num_rows - scale.shape[0], num_cols - scale.shape[1], 1.0)
        scale = _LAY_OUT[x.granularity](scale)  # (R / block_rows, C / block_cols)
    return QuantizedTensor(qdata, scale, x.granularity)


def aligned_operand(x: QuantizedTensor) -> QuantizedTensor:
    """Return an operand at addresses that cuBLASLt takes, scales included.

    Of a scale at another it says CUBLAS_STATUS_NOT_SUPPORTED, after it has chosen a kernel.
    """
    if is_aligned(x.scale) and is_aligned(x.qdata):
        return x
    return QuantizedTensor(aligned(x.qdata), aligned(x.scale), x.granularity)


def with_columns(qdata: Tensor, cols: int) -> Tensor:
    """Return a payload with zeros up to `cols` columns."""
    return _pad_payload(qdata, 0, cols - qdata.shape[1])


def _with_rows_behind(x: QuantizedTensor, rows: int) -> QuantizedTensor | None:
    """Return x extended over the memory behind it to `rows` rows; None if there is none.

    The contents of that memory reach only rows of the product that are cut off. Scales are laid out
    with this room wherever such a payload is made.
    """
    cols, groups = x.qdata.shape[1], x.scale.shape[1]
    if x.scale.stride() != (1, rows) or not x.qdata.is_contiguous():
        return None
    if _elements_from(x.qdata) < rows * cols or _elements_from(x.scale) < rows * groups:
        return None
    return x._replace(
        qdata=x.qdata.as_strided((rows, cols), (cols, 1)),
        scale=x.scale.as_strided((rows, groups), (1, rows)),
    )


def _elements_from(x: Tensor) -> int:
    """Return how many elements lie in the memory of x from its first element on."""
    return x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()


def _pad_payload(qdata: Tensor, rows: int, cols: int) -> Tensor:
    return _pad(qdata.view(torch.uint8), rows, cols, 0).view(qdata.dtype)


def _pad(x: Tensor, rows: int, cols: int, value: float) -> Tensor:
    return F.pad(x, (0, cols, 0, rows), value=value) if rows or cols else x


def _column_major(scale: Tensor) -> Tensor:
    """Return (R, L) with strides (1, R), also where L is 1.

    Where L is 1 any stride would do, but torch 2.11 takes a different one for one operand only if
    the other operand has it as well.
    """
    if scale.stride() == (1, scale.shape[0]):
        return scale
    scale = scale.t().contiguous().t()  # strides (L, 1) -> (1, R)
    return scale.as_strided(scale.shape, (1, scale.shape[0])) if scale.shape[1] == 1 else scale


def _square_blocks(scale: Tensor) -> Tensor:
    """Lay out (ceil(R / 128), L) as (L rounded up to 4, ceil(R / 128)), dimension 0 contiguous."""
    return _pad(scale, 0, -scale.shape[1] % 4, 1.0).contiguous().t()


def _swizzled_e8m0(scale: Tensor) -> Tensor:
    """Lay out (R, L) float32 powers of two as flat E8M0 bytes in tiles of 128 rows x 4 blocks.

    Within a tile the byte of row r and block c lies at (r % 32) * 16 + (r // 32) * 4 + c; tiles
    follow each other row by row (cuBLAS documentation, "1D block scaling factors layout"). An E8M0
    byte is the exponent field of the float32; Inf and NaN both give 255, its NaN. Rows are filled
    up to whole tiles with what lies in memory behind them, where `new_group_scales` has left room,
    for these bytes belong to rows of the product that do not exist; else with zeros, by a copy.
    """
    (rows, blocks), more = scale.shape, -scale.shape[0] % E8M0_ROWS
    if scale.is_contiguous() and _elements_from(scale) >= (rows + more) * blocks:
        scale, more = scale.as_strided((rows + more, blocks), (blocks, 1)), 0
    exponent = (scale.view(torch.int32) >> 23).to(torch.uint8)
    exponent = _pad(exponent, more, -blocks % 4, 0)
    rows, cols = exponent.shape
    # (tile row, 4, 32, tile column, 4) -> (tile row, tile column, 32, 4, 4)
    tiles = exponent.view(rows // 128, 4, 32, cols // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


_LAY_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "block_1x128": _column_major,
    "block_128x128": _square_blocks,
    "block_1x32": _swizzled_e8m0,
}
