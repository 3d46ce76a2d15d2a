"""The largest magnitude of a matrix, as an operator that torch.compile can replace.

In a graph the producer of a matrix may already compute its amax; then
`torch_fp8.compile.quantize_fusion` uses that, and otherwise traces plain torch in place of this
operator.
"""

import torch
from torch import Tensor

from torch_fp8.ops.registry import operator
from torch_fp8.quantization.scaling import tensor_amax


def _amax_fake(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@operator(_amax_fake, cuda=tensor_amax)
def amax(x: Tensor) -> Tensor:
    """Return max |x| as a () float32 tensor; see `tensor_amax`."""
    return tensor_amax(x)
