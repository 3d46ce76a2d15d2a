"""`Int8Momentum`: a momentum in linear int8.

``optimizer.state[p]["momentum_buffer"]`` of a converted Muon holds it between steps.
`torch_fp8.quantization.linear_int8` describes the codes. Writes by user code round to nearest.
"""

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import matrix_shape
from torch_fp8.quantization.linear_int8 import GROUP, LinearInt8, decode, encode, thresholds
from torch_fp8.quantization.stochastic_rounding import element_index
from torch_fp8.tensor.quantized_state import QuantizedState


class Int8Momentum(QuantizedState):
    """A momentum with int8 codes (R, K) and bfloat16 scales (R, ceil(K / 64))."""

    codes: LinearInt8

    @staticmethod
    def zeros(like: Tensor) -> "Int8Momentum":
        """Return a momentum of zeros with the shape and device of `like`, a plain tensor."""
        rows, cols = matrix_shape(like.shape)
        qdata = torch.zeros((rows, cols), dtype=torch.int8, device=like.device)
        scale = torch.ones((rows, -(-cols // GROUP)), dtype=torch.bfloat16, device=like.device)
        return Int8Momentum(LinearInt8(qdata, scale), like.shape)

    def round_step(
        self, x: Tensor, counters: tuple[int, int, int], origin: tuple[int, int, int]
    ) -> None:
        """Store the momentum after a step, rounded with the step's thresholds.

        Args:
            x: momentum of this shape.
            counters: seed, step and index of the parameter.
            origin: row and column at which this shard starts in the whole matrix, and the number of
                columns of the whole.
        """
        row, col, row_length = origin

        def rounded(rows: Tensor, first_row: int) -> LinearInt8:
            size = len(rows), rows.shape[1]
            index = element_index(*size, row + first_row, col, row_length, rows.device)
            return encode(rows, thresholds(index, *counters))

        self.write(x, rounded)

    def encode_rows(self, rows: Tensor) -> LinearInt8:
        return encode(rows)

    def decode_rows(self, codes: LinearInt8) -> Tensor:
        return decode(codes)
