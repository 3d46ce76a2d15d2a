"""Operands of the scaled matmul in the form of the CUDA operator: padded, with scales laid out.

Sizes that tensor cores do not support are padded with zeros, which do not change a sum.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.quantization.payload_shape import BLOCK_SHAPE, E8M0_ROWS

ALIGNMENT = 16
"""The bytes that kernels move at once if an address is a multiple of them.

Allocated memory is aligned, but a view need not be. In a DistributedDataParallel bucket all
gradients after a bias of odd size are unaligned, and would be moved element by element.
"""


def is_aligned(x: Tensor) -> bool:
    """Return whether x starts at a multiple of ALIGNMENT bytes in its memory."""
    return x.storage_offset() * x.dtype.itemsize % ALIGNMENT == 0


def aligned(x: Tensor) -> Tensor:
    """Return x, or an aligned copy of it."""
    return x if is_aligned(x) else x.clone()


def operand(
    x: QuantizedTensor, contracted: int, *, is_b: bool, row_multiple: int = 1
) -> QuantizedTensor:
    """Return x with its payload padded and its scales laid out for the CUDA operator.

    The contraction dimension is padded to a multiple of 16, with block scales of 128 to a multiple
    of 128. The rows of b, and those of a with block scales, are padded to a multiple of 16, with
    square blocks to a multiple of 128. The scales of the padding are 1. If the cast has already
    padded, nothing is done.

    Args:
        x: (R, C), possibly with additional columns of zeros.
        contracted: C.
        is_b: whether x is the second operand.
        row_multiple: a power of two that the number of rows must also be a multiple of.
    """
    blocks_of_128 = x.granularity in ("block_1x128", "block_128x128")
    col_multiple = 128 if blocks_of_128 else GEMM_ALIGNMENT
    if x.granularity == "block_128x128":
        row_multiple = max(row_multiple, 128)
    elif (is_b or blocks_of_128) and row_multiple < GEMM_ALIGNMENT:
        row_multiple = GEMM_ALIGNMENT
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
    """Return an operand whose payload and scales are at addresses that cuBLASLt supports.

    For a scale at an unaligned address cuBLASLt chooses a kernel and then returns
    CUBLAS_STATUS_NOT_SUPPORTED.
    """
    scale_offset = x.scale.storage_offset() * x.scale.dtype.itemsize
    if not (x.qdata.storage_offset() | scale_offset) % ALIGNMENT:
        return x
    return QuantizedTensor(aligned(x.qdata), aligned(x.scale), x.granularity)


def with_columns(qdata: Tensor, cols: int) -> Tensor:
    """Return a payload zero-padded to `cols` columns."""
    return _pad_payload(qdata, 0, cols - qdata.shape[1])


def _with_rows_behind(x: QuantizedTensor, rows: int) -> QuantizedTensor | None:
    """View x as `rows` rows, reading into the memory behind it, or None if its storage is shorter.

    The contents of that memory only affect rows of the product that are cut off. Scales are
    allocated with this additional room wherever such a payload is created.
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
    """Return the number of elements in x's storage from its first element on."""
    return x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()


def _pad_payload(qdata: Tensor, rows: int, cols: int) -> Tensor:
    return _pad(qdata.view(torch.uint8), rows, cols, 0).view(qdata.dtype)


def _pad(x: Tensor, rows: int, cols: int, value: float) -> Tensor:
    return F.pad(x, (0, cols, 0, rows), value=value) if rows or cols else x


def _column_major(scale: Tensor) -> Tensor:
    """Return (R, L) with strides (1, R), even if L is 1.

    If L is 1, any stride would be valid, but torch 2.11 accepts another stride for one operand only
    if the other operand has it, too.
    """
    if scale.stride() == (1, scale.shape[0]):
        return scale
    scale = scale.t().contiguous().t()  # strides (L, 1) -> (1, R)
    return scale.as_strided(scale.shape, (1, scale.shape[0])) if scale.shape[1] == 1 else scale


def _square_blocks(scale: Tensor) -> Tensor:
    """Lay out (ceil(R / 128), L) as (L padded to 4, ceil(R / 128)), strides (1, L)."""
    return _pad(scale, 0, -scale.shape[1] % 4, 1.0).contiguous().t()  # strides (L, 1) -> (1, L)


def _swizzled_e8m0(scale: Tensor) -> Tensor:
    """Lay out (R, L) float32 powers of two as flat E8M0 bytes in tiles of 128 rows x 4 blocks.

    In a tile the byte of row r and block c is at (r % 32) * 16 + (r // 32) * 4 + c; tiles follow
    each other row by row (cuBLAS documentation, "1D block scaling factors layout"). An E8M0 byte is
    the exponent field of the float32; Inf and NaN both give 255, E8M0's NaN. Rows are padded to
    whole tiles with the memory after them if `new_group_scales` has left room, because these bytes
    belong to rows of the product that do not exist; otherwise a copy pads with zeros.
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
