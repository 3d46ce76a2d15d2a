"""`ScaleSource`: the scale of a cast, and the slot that records its amax."""

from torch import Tensor

from torch_fp8.quantization.scaling import raise_slot


class ScaleSource:
    """The scale of an operand, and the slot that collects its amaxes.

    Args:
        scale: () float32 dequantization scale, or None to compute it from the current tensor. The
            attribute may be replaced later, but the tensor is not written to.
        slot: see `torch_fp8.quantization.scaling.raise_slot`; each cast raises it to the largest
            magnitude of its input, or None if amaxes are not recorded.
    """

    def __init__(self, scale: Tensor | None = None, slot: Tensor | None = None) -> None:
        self.scale, self.slot = scale, slot

    def record(self, amax: Tensor) -> None:
        """Raise the slot to the largest of `amax`.

        Args:
            amax: float32, any shape; a NaN propagates.
        """
        if self.slot is not None:
            raise_slot(self.slot, amax)


OF_TENSOR = ScaleSource()
"""Source without a known scale: each tensor is scaled by its own amax."""
