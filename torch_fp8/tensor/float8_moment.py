"""`Float8Moment`: a moment of Adam in 8 bits that reads, and takes writes, as a float32 tensor.

It is what ``optimizer.state[p]["exp_avg"]`` and ``["exp_avg_sq"]`` hold for a large weight, so that
code which reads, resets, scales or prunes a stock optimizer's state works on ours. The optimizer's
step takes the codes. `torch_fp8.quantization.block_scaled` describes them; what others write is
rounded to nearest, and writing back what was read changes nothing.

Copies by operators (``clone``, ``to`` another dtype) are plain float32 tensors, and so is a pickle.
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
    row_parts,
)
from torch_fp8.quantization.formats import MOMENT1, MOMENT2, ByteFloat
from torch_fp8.tensor.encoded import Encoded, EncodedView

MOMENT_FORMATS = {"exp_avg": MOMENT1, "exp_avg_sq": MOMENT2}
_SCALE_ONE = 127
_aten: Any = torch.ops.aten


class Float8Moment(Encoded):
    """A moment in 8 bits; aliases share its codes and scales, which are written in place.

    Attributes:
        codes: codes (R, K) and scales (R, ceil(K / 32)), uint8; (R, K) is `matrix_shape` of the
            shape.
        format: format of the codes.
    """

    codes: BlockScaled
    format: ByteFloat

    @staticmethod
    def __new__(cls, codes: BlockScaled, format: ByteFloat, shape: torch.Size) -> "Float8Moment":
        self: Float8Moment = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=codes.qdata.device
        )
        self.codes, self.format = codes, format
        return self

    @staticmethod
    def zeros(like: Tensor, format: ByteFloat) -> "Float8Moment":
        """Return a moment of zeros with the shape and device of `like`, a plain tensor."""
        rows, cols = matrix_shape(like.shape)
        qdata = torch.zeros((rows, cols), dtype=torch.uint8, device=like.device)
        scale = torch.full_like(qdata[:, : num_groups(cols)], _SCALE_ONE)
        return Float8Moment(BlockScaled(qdata, scale.contiguous()), format, like.shape)

    @torch.no_grad()
    def dequantize(self, device: torch.device | None = None) -> Tensor:
        """Return a plain float32 tensor, on `device` if one is given; rows are decoded in parts."""
        rows, cols = self.codes.qdata.shape
        device = device or self.codes.qdata.device
        value = torch.empty((rows, cols), dtype=torch.float32, device=device)
        for part in row_parts(rows, cols) if device.type != "meta" else ():
            value[part] = decode(BlockScaled(*(x[part] for x in self.codes)), self.format)
        return value.view(self.shape)

    @torch.no_grad()
    def store(self, x: Tensor) -> None:
        if isinstance(x, (Encoded, EncodedView)):
            x = x.dequantize()
        rows, cols = self.codes.qdata.shape
        matrix = x.detach().expand(self.shape).reshape(rows, cols)
        for part in row_parts(rows, cols):
            source = matrix[part].to(self.device, torch.float32)
            for target, value in zip(self.codes, encode(source, self.format), strict=True):
                target[part] = value

    def alias(self) -> "Float8Moment":
        return self.like(self.codes)

    def like(self, codes: BlockScaled) -> "Float8Moment":
        """Return a moment of this format and shape with other codes."""
        return Float8Moment(codes, self.format, self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], (self.format, self.shape)

    @property
    def qdata(self) -> Tensor:
        return self.codes.qdata

    @property
    def scale(self) -> Tensor:
        return self.codes.scale

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "Float8Moment":
        return Float8Moment(BlockScaled(**inner), *context)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Float8Moment":
        memo[id(self)] = result = self.like(BlockScaled(*(x.clone() for x in self.codes)))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        return f"{self.dequantize()!r} in 8 bits"


def _to_copy(moment: Float8Moment, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    if dtype not in (None, torch.float32) or device is None:
        return NotImplemented
    return moment.like(BlockScaled(*(x.to(device) for x in moment.codes)))


def _zero(moment: Float8Moment) -> Float8Moment:
    moment.codes.qdata.zero_()
    moment.codes.scale.fill_(_SCALE_ONE)
    return moment


Float8Moment.handlers = {
    _aten._to_copy.default: _to_copy,
    _aten.zero_.default: _zero,
}
