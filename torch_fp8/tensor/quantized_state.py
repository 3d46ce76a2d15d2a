"""`Coded`: a tensor stored as codes and scales; `QuantizedState`: an optimizer's state in 8 bits.

`Float8Moment` is a moment of Adam, `Int8Momentum` the momentum of a converted Muon.

Code that reads, resets, scales or prunes a stock optimizer's state works with it. The optimizer's
step uses the codes. Copies by operators (``clone``, ``to`` another dtype) and pickles are plain
float32 tensors.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.function import outside_inference_mode
from torch_fp8.quantization import linear_int8
from torch_fp8.quantization.block_scaled import (
    BlockScaled,
    decode,
    encode,
    matrix_shape,
    num_groups,
    row_parts,
)
from torch_fp8.quantization.formats import MOMENT1, MOMENT2, ByteFloat
from torch_fp8.quantization.linear_int8 import GROUP, LinearInt8, thresholds
from torch_fp8.quantization.stochastic_rounding import element_index
from torch_fp8.tensor.base import wrapper
from torch_fp8.tensor.encoded import Encoded, plain


class Coded(Encoded):
    """A tensor of codes and scales, which are written in place and shared by aliases.

    Attributes:
        codes: named tuple of tensors, at least the codes ``qdata`` and a ``scale`` for each group
            along a row; (R, K) is `matrix_shape` of the tensor's shape.
        form: arguments of the class that follow the codes.
    """

    codes: Any
    form: tuple[Any, ...]
    qdata = property(operator.attrgetter("codes.qdata"))
    scale = property(operator.attrgetter("codes.scale"))

    def alias(self) -> Any:
        return self.like(self.codes)

    def like(self, codes: Any) -> Any:
        """Return a tensor of this form with other codes."""
        return type(self)(codes, *self.form)

    def map_codes(self, function: Any) -> Any:
        """Return a tensor with `function` applied to the codes and scales."""
        return self.like(type(self.codes)(*map(function, self.codes)))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.codes._fields), (type(self.codes), *self.form)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        codes, *form = context
        return cls(codes(**inner), *form)

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.map_codes(torch.clone)


class QuantizedState(Coded):
    """An optimizer's state, which reads as float32.

    Attributes:
        format: format of the codes, if there are several.
    """

    format: Any

    @staticmethod
    def __new__(cls: Any, codes: Any, shape: torch.Size, format: Any = None) -> Any:
        self = wrapper(cls, shape, torch.float32, codes.qdata.device)
        self.codes, self.form, self.format = codes, (shape, format), format
        return self

    def encode_rows(self, rows: Tensor) -> Any:
        """Return the codes of some rows (r, K) float32, rounded to nearest."""
        raise NotImplementedError

    def decode_rows(self, codes: Any) -> Tensor:
        """Return the values (r, K) float32 of some rows' codes."""
        raise NotImplementedError

    @torch.no_grad()
    def dequantize(self, device: torch.device | None = None) -> Tensor:
        """Return a plain float32 tensor, on `device` if given, decoded a few rows at a time."""
        rows, cols = matrix_shape(self.shape)
        device = device or self.device
        value = torch.empty((rows, cols), dtype=torch.float32, device=device)
        for part in row_parts(rows, cols) if device.type != "meta" else ():
            value[part] = self.decode_rows(type(self.codes)(*(x[part] for x in self.codes)))
        return value.view(self.shape)  # (R, K) -> the tensor's shape

    def store(self, x: Tensor) -> None:
        self.write(x, lambda rows, first_row: self.encode_rows(rows))

    @torch.no_grad()
    def write(self, x: Tensor, encode: Callable[[Tensor, int], Any]) -> None:
        """Encode a tensor in place, a few rows at a time.

        Args:
            x: tensor that broadcasts to this shape.
            encode: function from rows (r, K) float32 and the index of the first row to codes.
        """
        rows, cols = matrix_shape(self.shape)
        matrix = plain(x).detach().expand(self.shape).reshape(rows, cols)
        for part in row_parts(rows, cols) if self.device.type != "meta" else ():
            encoded = encode(matrix[part].to(self.device, torch.float32), part.start)
            for target, value in zip(self.codes, encoded, strict=True):
                target[part] = value

    def take(self, x: Tensor) -> None:
        self.codes = type(self.codes)(*map(torch.empty_like, self.codes))  # aliases keep theirs
        self.store(x)

    def __repr__(self, **options: Any) -> str:
        return f"{self.dequantize()!r} in 8 bits"


def _to_copy(state: QuantizedState, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    if dtype not in (None, torch.float32) or device is None:
        return NotImplemented
    return state.map_codes(lambda x: x.to(device))


QuantizedState.handlers = {torch.ops.aten._to_copy.default: _to_copy}


MOMENT_FORMATS = {"exp_avg": MOMENT1, "exp_avg_sq": MOMENT2}
_SCALE_ONE = 127


class Float8Moment(QuantizedState):
    """A moment with uint8 codes (R, K) of a format, and uint8 scales (R, ceil(K / 32)).

    ``optimizer.state[p]["exp_avg"]`` and ``["exp_avg_sq"]`` hold it for a large weight.
    `torch_fp8.quantization.block_scaled` describes the codes. Writes by code other than the
    optimizer round to nearest, and writing back a value that was read changes nothing.
    """

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


Float8Moment.handlers = {**QuantizedState.handlers, torch.ops.aten.zero_.default: _zero}


class Int8Momentum(QuantizedState):
    """A momentum with int8 codes (R, K) and bfloat16 scales (R, ceil(K / 64)).

    ``optimizer.state[p]["momentum_buffer"]`` holds it between steps.
    `torch_fp8.quantization.linear_int8` describes the codes. Writes by user code round to nearest.
    """

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
            return linear_int8.encode(rows, thresholds(index, *counters))

        self.write(x, rounded)

    def encode_rows(self, rows: Tensor) -> LinearInt8:
        return linear_int8.encode(rows)

    def decode_rows(self, codes: LinearInt8) -> Tensor:
        return linear_int8.decode(codes)
