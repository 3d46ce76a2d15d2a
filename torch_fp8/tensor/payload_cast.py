"""`PayloadCast`: how the payload is cast that a weight in two halves keeps from step to step."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import (
    QuantizedTensor,
    as_layouts,
    quantize_layouts,
    quantize_stacked,
)
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.quantization.recipe import CastSpec


class PayloadCast(NamedTuple):
    """A cast of a stored weight (R, C), or of the weights (E, R, C) of E experts, in one layout.

    Attributes:
        spec: format and granularity.
        flip: whether the payload is that of the transpose (C, R), quantized along R.
    """

    spec: CastSpec
    flip: bool = False

    @staticmethod
    def of(spec: CastSpec, transposed: bool) -> "PayloadCast":
        """Return the cast for a layer whose weight is stored as (N, K), or `transposed` as (K, N).

        Squares are cast as they are stored, for both layouts have the same scales. Other payloads
        serve forward alone, which reads (N, K), quantized along K.
        """
        return PayloadCast(spec, transposed and spec.granularity not in SQUARE)

    @property
    def needs_amax(self) -> bool:
        """Whether the scale comes from the weight's amax, which takes a read of its own.

        With delayed scaling, too: the optimizer knows the amax of the weight that it writes.
        """
        return self.spec.granularity == "tensorwise"

    @property
    def serves_backward(self) -> bool:
        """Whether backward reads the same bytes, transposed."""
        return self.spec.granularity in SQUARE

    def num_bytes(self, halves: Any) -> int:
        """Return the bytes of the payload and its scales."""
        payload = self.empty(halves.high.to("meta"))
        return payload.qdata.nbytes + payload.scale.nbytes

    def __call__(self, halves: Any) -> QuantizedTensor:
        """Cast the BF16 half of `torch_fp8.tensor.halves.Halves`, with the amax that they keep."""
        if halves.high.ndim == 3:
            return quantize_stacked(halves.high.mT if self.flip else halves.high, self.spec)
        amax = halves.current_amax() if self.needs_amax else None
        row, col = quantize_layouts(halves.high, self._options(amax))
        payload = col if self.flip else row
        assert payload is not None
        return payload

    def empty(self, high: Tensor) -> QuantizedTensor:
        """Allocate the payload of a BF16 half."""
        if high.ndim == 3:
            experts, rows, cols = high.mT.shape if self.flip else high.shape
            qdata = high.new_empty((experts, rows, cols), dtype=self.spec.format.dtype)
            scale = high.new_empty((experts, rows, 1), dtype=torch.float32)
            return QuantizedTensor(qdata, scale, self.spec.granularity)
        options = self._options(None)
        row, col = as_layouts(options.new_layouts(high), options)
        payload = col if self.flip else row
        assert payload is not None
        return payload

    def _options(self, amax: Tensor | None) -> CastOptions:
        layout = {"rowwise": not self.flip, "columnwise": self.flip}
        return CastOptions.of(self.spec, None, amax, **layout)
