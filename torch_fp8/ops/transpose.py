"""The transpose of FP8 bytes that a backward takes of a weight whose bytes forward has.

``torch_fp8::transposed_in_backward`` takes the gradient that backward begins with, too, so that a
graph which torch.compile cuts in two cannot move the transpose to forward and keep it.
"""

import torch
from torch import Tensor

from torch_fp8.ops.registry import define, operators


def transposed_in_backward(qdata: Tensor, grad_output: Tensor) -> Tensor:
    """The reference of ``torch_fp8::transposed_in_backward``: qdata^T, contiguous.

    Args:
        qdata: (N, K), FP8.
        grad_output: that backward begins with; not read.
    Returns:
        (K, N), FP8.
    """
    del grad_output
    return qdata.t().clone(memory_format=torch.contiguous_format)


def transpose_in_backward(qdata: Tensor, grad_output: Tensor) -> Tensor:
    """Run ``torch_fp8::transposed_in_backward``."""
    made: Tensor = operators.transposed_in_backward(qdata, grad_output)
    return made


define(
    "transposed_in_backward(Tensor qdata, Tensor grad_output) -> Tensor",
    transposed_in_backward,
    transposed_in_backward,
    transposed_in_backward,
)
