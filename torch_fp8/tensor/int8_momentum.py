"""`Int8Momentum`: a momentum in linear int8 that reads, and takes writes, as a float32 tensor.

It is what ``optimizer.state[p]["momentum_buffer"]`` holds between the steps of a converted Muon.
`torch_fp8.quantization.linear_int8` describes its codes. Writes of user code round to nearest.
Copies by operators are plain float32 tensors, and so is a pickle.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import matrix_shape, row_parts
from torch_fp8.quantization.linear_int8 import GROUP, LinearInt8, decode, encode, thresholds
from torch_fp8.quantization.stochastic_rounding import element_index
from torch_fp8.tensor.encoded import Encoded, plain

_aten: Any = torch.ops.aten


class Int8Momentum(Encoded):
    """A momentum in int8; aliases share its codes and scales, which are written in place.

    Attributes:
        codes: codes (R, K) and scales (R, ceil(K / 64)); (R, K) is `matrix_shape` of the shape.
    """

    codes: LinearInt8

    @staticmethod
    def __new__(cls, codes: LinearInt8, shape: torch.Size) -> "Int8Momentum":
        self: Int8Momentum = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=codes.qdata.device
        )
        self.codes = codes
        return self

    @staticmethod
    def zeros(like: Tensor) -> "Int8Momentum":
        """Return a momentum of zeros with the shape and device of `like`, a plain tensor."""
        rows, cols = matrix_shape(like.shape)
        qdata = torch.zeros((rows, cols), dtype=torch.int8, device=like.device)
        scale = torch.ones((rows, -(-cols // GROUP)), dtype=torch.bfloat16, device=like.device)
        return Int8Momentum(LinearInt8(qdata, scale), like.shape)

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        rows, cols = self.codes.qdata.shape
        value = torch.empty((rows, cols), dtype=torch.float32, device=self.device)
        for part in row_parts(rows, cols) if self.device.type != "meta" else ():
            value[part] = decode(LinearInt8(*(x[part] for x in self.codes)))
        return value.view(self.shape)

    @torch.no_grad()
    def store(self, x: Tensor) -> None:
        self._store(x, None, (0, 0, 0))

    def round_step(
        self, x: Tensor, counters: tuple[int, int, int], origin: tuple[int, int, int]
    ) -> None:
        """Store the momentum of a step, rounded by the step's thresholds.

        Args:
            x: momentum, of this shape.
            counters: seed, step and index of the parameter.
            origin: row and column where this shard starts in the whole matrix, and its columns.
        """
        self._store(x, counters, origin)

    def _store(
        self, x: Tensor, counters: tuple[int, int, int] | None, origin: tuple[int, int, int]
    ) -> None:
        rows, cols = self.codes.qdata.shape
        matrix = plain(x).detach().expand(self.shape).reshape(rows, cols)
        row, col, row_length = origin
        for part in row_parts(rows, cols) if self.device.type != "meta" else ():
            source, threshold = matrix[part].to(self.device, torch.float32), None
            if counters is not None:
                start = row + part.start
                index = element_index(len(source), cols, start, col, row_length, self.device)
                threshold = thresholds(index, *counters)
            for target, value in zip(self.codes, encode(source, threshold), strict=True):
                target[part] = value

    def alias(self) -> "Int8Momentum":
        return Int8Momentum(self.codes, self.shape)

    @property
    def qdata(self) -> Tensor:
        return self.codes.qdata

    @property
    def scale(self) -> Tensor:
        return self.codes.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], self.shape

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "Int8Momentum":
        return Int8Momentum(LinearInt8(**inner), context)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Int8Momentum":
        codes = LinearInt8(*(x.clone() for x in self.codes))
        memo[id(self)] = result = Int8Momentum(codes, self.shape)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        return f"{self.dequantize()!r} in int8"


def _to_copy(x: Int8Momentum, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    if dtype not in (None, torch.float32) or device is None:
        return NotImplemented
    return Int8Momentum(LinearInt8(*(part.to(device) for part in x.codes)), x.shape)


Int8Momentum.handlers = {_aten._to_copy.default: _to_copy}
