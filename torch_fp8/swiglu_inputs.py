"""What SwiGLU's backward reads: the arguments that all its operators begin with."""

from typing import NamedTuple

import torch
from torch import Tensor


class BackwardInputs(NamedTuple):
    """Arguments of SwiGLU's backward, for ``h = silu(gate) * up * smooth``.

    Legend: R rows (tokens), C columns (features). Tensors have any strides.

    Attributes:
        grad: (R, C) float32, bfloat16 or float16, the gradient of h.
        gate, up: (R, C), or, with their scales, the FP8 that was saved of them.
        gate_scale, up_scale: (R, ceil(C / 128)) float32 or None.
        smooth: (C,) float32 or None.
        out_dtype: of the gradients of gate and up.
    """

    grad: Tensor
    gate: Tensor
    gate_scale: Tensor | None
    up: Tensor
    up_scale: Tensor | None
    smooth: Tensor | None
    out_dtype: torch.dtype


NUM_INPUTS = len(BackwardInputs._fields)

BACKWARD_ARGUMENTS = (
    "Tensor grad, Tensor gate, Tensor? gate_scale, Tensor up, Tensor? up_scale, Tensor? smooth, "
    "ScalarType out_dtype"
)
"""The same in an operator's schema."""
