"""The kernel that transposes FP8 bytes, which reads and writes each byte once."""

import triton
import triton.language as tl

from torch_fp8.kernels.quick_launch import quick


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

    A tile is loaded along the rows of x and stored along the rows of the result.

    Args:
        WHOLE: whether all sizes are multiples of 16, so every access can move 16 bytes.
    """
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
