"""The transpose of FP8 bytes on CUDA: the twin of `torch_fp8.ops.transpose.transposed_bytes`.

The kernel is memory-bound, with two bytes per element. torch's own copy of a transposed matrix of
single bytes reads or writes one byte at a time.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.transpose_kernels import transpose_kernel

BLOCK = 128
WARPS = 8


def transposed_in_backward(qdata: Tensor, after: Tensor) -> Tensor:
    """Return qdata^T in a launch that depends on `after`."""
    return transposed_bytes(qdata, qdata.shape[0], after)


def transposed_bytes(qdata: Tensor, columns: int, after: Tensor | None = None) -> Tensor:
    """Return qdata^T, padded with zeros to (C, `columns`), contiguous.

    Args:
        qdata: (R, C) of a one-byte dtype, any strides.
        columns: number of columns of the result, at least R.
        after: a tensor that the kernel takes and does not read, or None.
    """
    x = qdata.contiguous().view(torch.uint8)
    rows, cols = x.shape
    out = torch.empty((cols, columns), dtype=torch.uint8, device=x.device)
    if out.numel():
        transpose_kernel[(cdiv(columns, BLOCK), cdiv(cols, BLOCK))](
            x,
            out,
            x if after is None else after,
            rows,
            cols,
            columns,
            BLOCK=BLOCK,
            WHOLE=cols % 16 == 0 and columns % 16 == 0,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return out.view(qdata.dtype)
