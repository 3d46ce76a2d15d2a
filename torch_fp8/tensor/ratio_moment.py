"""`RatioMoment`: Adam's first moment in 4 bits, stored as its ratio to the root of the second.

With ``FP8Config(moment_bits=4)``, ``optimizer.state[p]["exp_avg"]`` of a large weight holds it.
`torch_fp8.quantization.ratio_int4` describes the codes. Reading it needs the second moment, whose
memory it shares with ``exp_avg_sq``.

If code other than the step writes to either moment, the first one is kept in float32 until the next
step. So a write to one moment never changes the other, in any order.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.quantization.ratio_int4 import RatioInt4, decode, encode, zeros
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.float8_moment import Float8Moment
from torch_fp8.tensor.quantized_state import QuantizedState


class RatioMoment(QuantizedState):
    """A first moment with int8 codes (R, K / 2), two to a byte, and uint8 scales (R, K / 8).

    Attributes:
        written: list with the float32 tensor that user code wrote since the last step, or empty;
            aliases share the list.
    """

    codes: RatioInt4
    written: list[Tensor]

    @staticmethod
    def __new__(cls: Any, codes: RatioInt4, shape: torch.Size, format: Any = None) -> Any:
        self = QuantizedState.__new__(cls, codes, shape)
        self.written = []
        return self

    @staticmethod
    def beside(second: Float8Moment, value: Tensor | None = None) -> "RatioMoment":
        """Return a first moment that is stored as a ratio to a second one.

        Args:
            second: second moment.
            value: value of the first moment, which is rounded to nearest; None: zeros.
        """
        moment = RatioMoment(zeros(second.codes), second.shape)
        if isinstance(value, RatioMoment) and value.is_ratio_to(second):
            for target, codes in zip(moment.codes[:2], value.codes[:2], strict=True):
                target.copy_(codes)
        elif value is not None:
            moment.encode(value)
        second.first = moment
        return moment

    def is_beside(self, second: Any) -> bool:
        """Return whether a step can use both: this is a ratio to `second`, and
        has no float32 value.
        """
        return second.first is not None and second.first.codes is self.codes and not self.written

    def is_ratio_to(self, second: Float8Moment) -> bool:
        """Return whether these codes have the same value as a ratio to `second`."""
        pairs = zip(self.codes.second, second.codes, strict=True)
        return not self.written and all(
            a is b or (a.device == b.device and torch.equal(a, b)) for a, b in pairs
        )

    def encode(self, x: Tensor) -> None:
        """Store a tensor in 4 bits, rounding to nearest."""

        def encoded(rows: Tensor, first_row: int) -> RatioInt4:
            part = slice(first_row, first_row + len(rows))
            return encode(rows, type(self.codes.second)(*(s[part] for s in self.codes.second)))

        self.write(x, encoded)
        self.written.clear()

    def store(self, x: Tensor) -> None:
        value = plain(x).detach().to(self.device, torch.float32, copy=True)
        self.written[:] = [value.expand(self.shape).contiguous()]

    def take(self, x: Tensor) -> None:
        self.codes, self.written = RatioInt4(*map(torch.clone, self.codes)), []
        self.store(x)

    def dequantize(self, device: torch.device | None = None) -> Tensor:
        if self.written:
            return self.written[0].to(device or self.device, copy=True)
        return super().dequantize(device)

    def decode_rows(self, codes: RatioInt4) -> Tensor:
        return decode(codes)

    def like(self, codes: Any) -> Any:
        moment = super().like(codes)
        moment.written = self.written if codes is self.codes else []
        return moment

    def map_codes(self, function: Any) -> Any:
        moment = super().map_codes(function)
        moment.written = list(map(function, self.written))
        return moment

    second_qdata = property(lambda self: self.codes.second_qdata)
    second_scale = property(lambda self: self.codes.second_scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self.written:
            self.encode(self.written[0])
        return super().__tensor_flatten__()
