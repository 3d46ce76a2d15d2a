"""`ScaleSource`: the scale of a cast, and the slot that records its amax."""

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import is_traced


class ScaleSource:
    """The scale of an operand, and the slot that collects its amaxes.

    Args:
        scale: () float32 dequantization scale; None: computed from the current tensor. The
            attribute may be replaced later, but the tensor is not written to.
        slot: () float32, raised by each cast to the largest magnitude of its input; None: amaxes
            are not recorded.
    """

    def __init__(self, scale: Tensor | None = None, slot: Tensor | None = None) -> None:
        self.scale, self.slot = scale, slot

    def record(self, amax: Tensor) -> None:
        """Raise the slot to the largest of `amax`.

        Args:
            amax: float32, any shape; a NaN propagates.
        """
        if self.slot is None:
            return
        amax = amax.amax() if amax.ndim else amax
        if is_traced():
            self.slot.copy_(torch.maximum(self.slot, amax))
        else:
            torch.maximum(self.slot, amax, out=self.slot)


OF_TENSOR = ScaleSource()
"""Source without a known scale: each tensor is scaled by its own amax."""
