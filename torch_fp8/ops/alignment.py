"""Alignment of tensors: kernels move 16 bytes at once where an address is a multiple of that.

Memory begins aligned. A view need not: in a bucket of DistributedDataParallel all gradients behind
a bias of an odd size begin in between, and each would be moved element by element.
"""

from torch import Tensor

ALIGNMENT = 16


def is_aligned(x: Tensor) -> bool:
    """Return whether x begins at a multiple of ALIGNMENT bytes of its memory."""
    return x.storage_offset() * x.element_size() % ALIGNMENT == 0


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of it where it is not aligned."""
    return x if is_aligned(x) else x.clone()
