"""FP8 weights of checkpoints: E4M3 codes and float32 scales of rectangular blocks.

``x ~= qdata.float() * scale``, whatever a format calls the scale (``weight_scale_inv`` is a
multiplier, too). The shape of the scales gives the size of the blocks: () or (1, 1) for one scale,
(N, 1) for one per row, (ceil(N / 128), ceil(K / 128)) for blocks of 128 x 128, (N, ceil(K / 32))
for groups of 32. N are output features, K input features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import row_parts
from torch_fp8.quantization.payload_shape import scale_shape
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.frozen_payload import FrozenPayload, frozen_from_bytes

FROZEN_BLOCK = (128, 128)
"""Rows and columns that share a scale in frozen weights, and in the recipe ``blockwise``."""


@dataclass(frozen=True)
class FP8Weight:
    """The exact value of a weight in an FP8 checkpoint.

    Attributes:
        qdata: (N, K) float8_e4m3fn.
        scale: (ceil(N / R), ceil(K / C)) float32, positive and finite.
        block: (R, C), numbers of rows and columns that share a scale.
    """

    qdata: Tensor
    scale: Tensor
    block: tuple[int, int]

    def to(self, device: torch.device) -> "FP8Weight":
        """Return the weight on another device."""
        return FP8Weight(self.qdata.to(device), self.scale.to(device), self.block)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of rows with their float32 values (r, K).

        A value is the code times the scale, rounded once (relative error 2^-24).
        """
        for rows in row_parts(*self.qdata.shape):
            yield rows, self.qdata[rows].float().mul_(_spread(self, rows))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K) in `dtype`, rounded once more for BF16 or float16."""
        whole = torch.empty(self.qdata.shape, dtype=dtype, device=self.qdata.device)
        for rows, value in self.parts():
            whole[rows] = value
        return whole


def scale_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape (ceil(N / R), ceil(K / C)) of the scales of a weight (N, K)."""
    return tuple(-(-n // side) for n, side in zip(shape, block, strict=True))


def frozen_payload(
    weight: FP8Weight, spec: CastSpec, name: str, dtype: torch.dtype
) -> FrozenPayload | None:
    """Return the bytes of a checkpoint's weight as the payload of a frozen weight.

    Args:
        weight: weight from a checkpoint.
        spec: cast of the frozen weight, ``block_128x128`` or ``tensorwise``. If `weight` has a
            single scale, each block gets it.
        name: qualified name, for errors.
        dtype: dtype of the weight when it is thawed.
    Returns:
        A payload that shares memory with `weight`; None if its blocks do not fit `spec`.
    """
    (rows, cols), scale = weight.qdata.shape, weight.scale
    if spec.granularity == "tensorwise":
        if scale.numel() != 1:
            return None
        scale = scale.reshape(())
    elif scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(scale_shape(rows, cols, spec.granularity))
    elif weight.block != FROZEN_BLOCK:
        return None
    return frozen_from_bytes(weight.qdata, scale.contiguous(), spec, name, dtype)


def _spread(weight: FP8Weight, rows: slice) -> Tensor:
    """Return a scale for each element of some rows: (rows, K), or a shape that broadcasts to it."""
    scale, (height, width) = weight.scale, weight.block
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    index = torch.arange(rows.start, rows.stop, device=scale.device) // height
    scale = scale[index]  # (rows, ceil(K / C))
    cols = weight.qdata.shape[1]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, 1)[:, :cols]
