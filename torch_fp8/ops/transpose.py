"""The transpose of FP8 bytes that a backward takes of a weight whose bytes forward has."""

import torch
from torch import Tensor

from torch_fp8.ops.registry import operator


def _transposed(qdata: Tensor, grad_output: Tensor) -> Tensor:
    return qdata.t().clone(memory_format=torch.contiguous_format)


@operator(_transposed, cuda=_transposed)
def transposed_in_backward(qdata: Tensor, grad_output: Tensor) -> Tensor:
    """The operator ``torch_fp8::transposed_in_backward``: qdata^T, contiguous.

    A graph that torch.compile cuts in two cannot move it to forward, for it takes the gradient.

    Args:
        qdata: (N, K), FP8.
        grad_output: that backward begins with; not read.
    Returns:
        (K, N), FP8.
    """
    return _transposed(qdata, grad_output)
