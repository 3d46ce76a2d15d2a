"""`ScaleSource`: where the scale of a cast comes from, and who is told what it has found."""

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import is_traced


class ScaleSource:
    """The scale of an operand, known before it is cast.

    Args:
        scale: () float32 dequantization scale; None: it is made from the tensor at hand. Others may
            take its place later; nobody writes to it.
        slot: () float32, which casts raise to the largest magnitude of what they cast; None: nobody
            wants to know.
    """

    def __init__(self, scale: Tensor | None = None, slot: Tensor | None = None) -> None:
        self.scale, self.slot = scale, slot

    def record(self, amax: Tensor) -> None:
        """Raise the slot.

        Args:
            amax: float32, any shape; the largest counts, and a NaN stays.
        """
        if self.slot is None:
            return
        amax = amax.amax() if amax.ndim else amax
        if is_traced():
            self.slot.copy_(torch.maximum(self.slot, amax))
        else:
            torch.maximum(self.slot, amax, out=self.slot)


OF_TENSOR = ScaleSource()
"""Each tensor has the scale of its own amax."""
