"""The transpose of FP8 bytes, by a kernel that reads and writes each byte once.

dgrad needs a weight's bytes in the other layout. If each scale covers as many rows as columns,
these are the same bytes that fprop reads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.ops.registry import operator


@operator(lambda qdata, columns, after=None: qdata.new_empty((qdata.shape[1], columns)))
def transposed_bytes(qdata: Tensor, columns: int, after: Tensor | None = None) -> Tensor:
    """The operator ``torch_fp8::transposed_bytes``: qdata^T, zero-padded to `columns` columns.

    Args:
        qdata: (R, C), FP8.
        columns: the number of columns, at least R.
        after: a tensor that backward computes, the smaller the better, so that torch.compile cannot
            move the transpose to forward when it partitions a graph; not read.
    Returns:
        (C, `columns`), FP8, contiguous.
    """
    more = columns - qdata.shape[0]
    if not more:
        return qdata.t().clone(memory_format=torch.contiguous_format)
    return F.pad(qdata.t().view(torch.uint8), (0, more)).view(qdata.dtype)
