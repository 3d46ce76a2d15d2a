"""Whether torch can swap a tensor's implementation with that of another tensor.

torch refuses to if C++ code has weak references to the tensor. torch.profiler keeps one for each
tensor that it has recorded with ``record_shapes`` or ``with_stack``, until the profiler is freed.
``torch.utils.swap_tensors`` changes both classes before it is refused, which leaves a tensor that
nothing can read. Ask here before anything is changed.
"""

import torch
from torch import Tensor

REFERRED = "torch.profiler refers to them"
"""Reason why weights keep their form."""


def swappable(tensor: Tensor) -> bool:
    """Return whether torch swaps a tensor's implementation, by swapping it there and back."""
    other = torch.empty(0, dtype=torch.float32, device="cpu")
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:
        return False
    torch._C._swap_tensor_impl(tensor, other)
    return True


def refuse_swap(tensor: Tensor) -> None:
    """Raise RuntimeError if torch cannot swap a tensor's implementation."""
    if not swappable(tensor):
        raise RuntimeError(
            f"a {tensor.dtype} weight {tuple(tensor.shape)} cannot be stored in another form, "
            "because torch.profiler has recorded it with record_shapes or with_stack and refers to "
            "it. The weight is unchanged. Change it before you profile, or after you have deleted "
            "the profiler object"
        )
