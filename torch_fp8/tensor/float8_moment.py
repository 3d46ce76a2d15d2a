"""`Float8Moment`: a moment of Adam in 8 bits.

``optimizer.state[p]["exp_avg"]`` and ``["exp_avg_sq"]`` hold it for a large weight.
`torch_fp8.quantization.block_scaled` describes the codes. Writes by code other than the optimizer
round to nearest, and writing back a value that was read changes nothing.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import (
    BlockScaled,
    decode,
    encode,
    matrix_shape,
    num_groups,
)
from torch_fp8.quantization.formats import MOMENT1, MOMENT2, ByteFloat
from torch_fp8.tensor.quantized_state import QuantizedState

MOMENT_FORMATS = {"exp_avg": MOMENT1, "exp_avg_sq": MOMENT2}
_SCALE_ONE = 127


class Float8Moment(QuantizedState):
    """A moment with uint8 codes (R, K) of a format, and uint8 scales (R, ceil(K / 32))."""

    codes: BlockScaled
    format: ByteFloat

    @staticmethod
    def zeros(like: Tensor, format: ByteFloat) -> "Float8Moment":
        """Return a moment of zeros with the shape and device of `like`, a plain tensor."""
        rows, cols = matrix_shape(like.shape)
        qdata = torch.zeros((rows, cols), dtype=torch.uint8, device=like.device)
        scale = torch.full_like(qdata[:, : num_groups(cols)], _SCALE_ONE)
        return Float8Moment(BlockScaled(qdata, scale.contiguous()), like.shape, format)

    def encode_rows(self, rows: Tensor) -> BlockScaled:
        return encode(rows, self.format)

    def decode_rows(self, codes: BlockScaled) -> Tensor:
        return decode(codes, self.format)


def _zero(moment: Float8Moment) -> Float8Moment:
    moment.codes.qdata.zero_()
    moment.codes.scale.fill_(_SCALE_ONE)
    return moment


_HANDLERS: dict[Any, Any] = {torch.ops.aten.zero_.default: _zero}
Float8Moment.handlers = QuantizedState.handlers | _HANDLERS
