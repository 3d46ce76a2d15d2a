"""The transpose of FP8 bytes on CUDA: the twin of `torch_fp8.ops.transpose.transposed_bytes`.

The kernel is memory-bound, with two bytes per element. torch's own copy of a transposed matrix of
single bytes reads or writes one byte at a time.
"""

import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.cast_launch import cdiv, pointers
from torch_fp8.kernels.quick_launch import quick


@triton.jit
def transpose_tile(
    tile_r,
    tile_c,
    x_ptr,
    out_ptr,
    rows,
    cols,
    out_cols,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write the transpose of one tile; see `transpose_kernel`.

    The tile is loaded along the rows of x and stored along the rows of the result.
    """
    r = tile_r * BLOCK + tl.arange(0, BLOCK)
    c = tile_c * BLOCK + tl.arange(0, BLOCK)
    if WHOLE:
        c_in = tl.max_contiguous(tl.multiple_of(c, 16), 16)
        r_out = tl.max_contiguous(tl.multiple_of(r, 16), 16)
    else:
        c_in, r_out = c, r
    offsets = r[:, None].to(tl.int64) * cols + c_in[None, :]
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    x = tl.load(x_ptr + offsets, mask=inside, other=0)
    offsets = c[:, None].to(tl.int64) * out_cols + r_out[None, :]
    inside = (c[:, None] < cols) & (r[None, :] < out_cols)
    tl.store(out_ptr + offsets, tl.trans(x), mask=inside)  # (columns of x, rows of x)


@quick
@triton.jit
def transpose_kernel(
    x_ptr,
    out_ptr,
    after_ptr,  # not read: a graph launches the kernel after it is written
    rows,
    cols,
    out_cols,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write the transpose (C, R') of x (R, C), contiguous uint8, with zeros beyond R.

    Args:
        WHOLE: whether all sizes are multiples of 16, so every access can move 16 bytes.
    """
    transpose_tile(
        *(tl.program_id(0), tl.program_id(1), x_ptr, out_ptr, rows, cols, out_cols, BLOCK, WHOLE)
    )


BLOCK = 128
WARPS = 8


def transposed_bytes(qdata: Tensor, columns: int, after: Tensor | None = None) -> Tensor:
    """Return qdata^T, padded with zeros to (C, `columns`), contiguous.

    Args:
        qdata: (R, C) of a one-byte dtype, any strides.
        columns: number of columns of the result, at least R.
        after: a tensor that the kernel takes and does not read, or None.
    """
    x, cols = qdata.contiguous(), qdata.shape[1]
    out = x.new_empty((cols, columns))
    if out.numel():
        transpose_kernel[(cdiv(columns, BLOCK), cdiv(cols, BLOCK))](
            *pointers((x, out, after), x),
            *x.shape,
            columns,
            BLOCK=BLOCK,
            WHOLE=cols % 16 == 0 and columns % 16 == 0,
            num_warps=WARPS,
        )
    return out
