"""The transpose of FP8 bytes, by a kernel that reads and writes each of them once.

dgrad takes a weight's bytes in the other layout. Where a scale belongs to as many rows as columns
they are the very bytes that fprop takes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.ops.registry import operator


def _empty(qdata: Tensor, columns: int) -> Tensor:
    return qdata.new_empty((qdata.shape[1], columns))


@operator(_empty)
def transposed_bytes(qdata: Tensor, columns: int) -> Tensor:
    """The operator ``torch_fp8::transposed_bytes``: qdata^T with zeros behind it.

    Args:
        qdata: (R, C), FP8.
        columns: at least R.
    Returns:
        (C, `columns`), FP8, contiguous.
    """
    more = columns - qdata.shape[0]
    if not more:
        return qdata.t().clone(memory_format=torch.contiguous_format)
    return F.pad(qdata.t().view(torch.uint8), (0, more)).view(qdata.dtype)


def _empty_in_backward(qdata: Tensor, grad_output: Tensor) -> Tensor:
    return qdata.new_empty((qdata.shape[1], qdata.shape[0]))


def _on_cuda(qdata: Tensor, grad_output: Tensor) -> Tensor:
    return transposed_bytes(qdata, qdata.shape[0])


@operator(_empty_in_backward, cuda=_on_cuda)
def transposed_in_backward(qdata: Tensor, grad_output: Tensor) -> Tensor:
    """The operator ``torch_fp8::transposed_in_backward``: qdata^T, contiguous.

    A graph that torch.compile cuts in two cannot move it to forward, for it takes the gradient.

    Args:
        qdata: (N, K), FP8.
        grad_output: the gradient with which backward begins; not read.
    Returns:
        (K, N), FP8.
    """
    return qdata.t().clone(memory_format=torch.contiguous_format)
