"""`ScaleTable`: one tensor with the scales of the payloads that the weights of a block keep.

A graph takes the table as one input in place of the scales, because each input takes host time.
"""

from typing import Any

import torch


class ScaleTable:
    """Scales of L payloads, in rows that are 16 bytes apart, as GEMMs need them.

    Args:
        num: the number of payloads.

    Attributes:
        scales: (L, 4) float32, of which the first column holds the scales; on the device of the
            weights, which all move together.
    """

    def __init__(self, num: int) -> None:
        self.scales = torch.zeros(num, 4, dtype=torch.float32, device="meta")

    def keep(self, halves: Any, row: int | None) -> None:
        """Store the scale of a payload in a row from now on.

        Args:
            halves: `torch_fp8.tensor.halves.Halves` with a payload.
            row: index of the row, which no other payload has.
        """
        with torch.inference_mode(False):
            if self.scales.device != halves.high.device:
                self.scales = torch.zeros_like(self.scales, device=halves.high.device)
            scale = self.scales[row, 0].copy_(halves.payload.scale)
        halves.payload = halves.payload._replace(scale=scale)
        halves.table, halves.row, halves.stepped = self, row, 0
