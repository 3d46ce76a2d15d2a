"""Alignment of tensors: kernels move 16 bytes at once if an address is a multiple of 16.

Allocated memory is aligned, but a view need not be. In a DistributedDataParallel bucket all
gradients after a bias of odd size are unaligned, and would be moved element by element.
"""

from torch import Tensor

ALIGNMENT = 16


def is_aligned(x: Tensor) -> bool:
    """Return whether x starts at a multiple of ALIGNMENT bytes in its memory."""
    return x.storage_offset() * x.element_size() % ALIGNMENT == 0


def aligned(x: Tensor) -> Tensor:
    """Return x, or an aligned copy of it."""
    return x if is_aligned(x) else x.clone()
