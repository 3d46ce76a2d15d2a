"""FP8 weights as checkpoints hold them: E4M3 codes and float32 scales of rectangular blocks.

``x ~= qdata.float() * scale``, whatever a format calls the scale (``weight_scale_inv`` is a
multiplier, too). The grid of the scales says how large the blocks are: () or (1, 1) one scale,
(N, 1) one for each row, (ceil(N / 128), ceil(K / 128)) blocks of 128 x 128, (N, ceil(K / 32))
groups. N are output features, K input features.
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
"""The blocks that frozen weights have."""

_SCALES = "_fp8_checkpoint_scales"
"""The attribute of a frozen Parameter that holds its scales, and the block that shares one."""

_LEAST_SCALE = 2.0**-100
"""Smaller scales make products below the normal range of BF16, which do not tell their code."""


@dataclass(frozen=True)
class FP8Weight:
    """The exact value of a weight in an FP8 checkpoint.

    Attributes:
        qdata: (N, K) float8_e4m3fn.
        scale: (ceil(N / R), ceil(K / C)) float32, positive and finite.
        block: (R, C), the rows and columns that share a scale.
    """

    qdata: Tensor
    scale: Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """The shape (N, K) of the weight."""
        return self.qdata.shape

    def to(self, device: torch.device) -> "FP8Weight":
        """Return the weight on a device."""
        return FP8Weight(self.qdata.to(device), self.scale.to(device), self.block)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the weight in float32, some rows at a time: E4M3 times scale, rounded once (to a
        relative 2^-24).
        """
        for rows in row_parts(*self.qdata.shape):
            yield rows, self.qdata[rows].float().mul_(_spread(self, rows))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K) in `dtype`, rounded once more for BF16 or float16."""
        whole = torch.empty(self.shape, dtype=dtype, device=self.qdata.device)
        for rows, value in self.parts():
            whole[rows] = value
        return whole

    def has_frozen_blocks(self) -> bool:
        """Return whether frozen weights may hold the bytes as they are: one scale, or blocks of
        128 x 128.
        """
        return self.scale.numel() == 1 or self.block == FROZEN_BLOCK


def frozen_payload(
    weight: FP8Weight, spec: CastSpec, name: str, dtype: torch.dtype
) -> FrozenPayload | None:
    """Return the very bytes as a frozen weight holds them.

    Args:
        weight: a weight of a checkpoint.
        spec: how the frozen weight is cast: ``block_128x128`` or ``tensorwise``. One scale for the
            whole weight is also that of each of its blocks.
        name: qualified, for errors.
        dtype: the weight's dtype when it is thawed.
    Returns:
        The payload, which shares memory with `weight`; None if its blocks are not those of `spec`.
    """
    (rows, cols), scale = weight.shape, weight.scale
    if spec.granularity == "tensorwise":
        if scale.numel() != 1:
            return None
        scale = scale.reshape(())
    elif scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(scale_shape(rows, cols, spec.granularity))
    elif weight.block != FROZEN_BLOCK:
        return None
    return frozen_from_bytes(weight.qdata, scale.contiguous(), spec, name, dtype)


def bytes_behind(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> FP8Weight | None:
    """Find the E4M3 codes whose products with `scale` were rounded to `weight`, exactly.

    The codes of a weight that was dequantized to BF16 are found by quantizing it again with the
    same scales: BF16 errs by a relative 2^-9 at most, and half the distance of two neighbours in
    E4M3 is 2^-5 or more. The products of the codes are compared with the weight, bit for bit.

    Args:
        weight: (N, K) bfloat16 or float32.
        scale: (ceil(N / R), ceil(K / C)) float32.
        block: (R, C).
    Returns:
        The codes and scales; None if any element of the weight is none of these products (it has
        been trained, or is another weight), or of another dtype.
    """
    if weight.dtype not in (torch.bfloat16, torch.float32) or weight.is_meta:
        return None
    if not weight.numel() or float(scale.min()) < _LEAST_SCALE:
        return None
    qdata = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    stored = FP8Weight(qdata, scale.to(weight.device), block)
    for rows in row_parts(*weight.shape):
        factor = _spread(stored, rows)
        part = weight[rows]
        # What lies beyond the largest code is refused by the comparison, saturated or NaN.
        codes = (part.float() / factor).to(torch.float8_e4m3fn)
        if not torch.equal(codes.float().mul_(factor).to(weight.dtype), part):
            return None
        qdata[rows] = codes
    return stored


def remember_scales(weight: Tensor, known: FP8Weight) -> None:
    """Keep the scales of a frozen weight beside it, for `known_bytes`."""
    setattr(weight, _SCALES, (known.scale, known.block))


def known_payload(weight: Tensor, spec: CastSpec, name: str) -> FrozenPayload | None:
    """Return `known_bytes` as frozen weights hold them.

    Args:
        weight: (N, K), beside which `remember_scales` may have put scales.
        spec: how the frozen weight is cast.
        name: qualified, for errors.
    Returns:
        The payload; None if the bytes are not known, or their blocks are not those of `spec`.
    """
    known = known_bytes(weight)
    return None if known is None else frozen_payload(known, spec, name, weight.dtype)


@torch.no_grad()
def known_bytes(weight: Tensor) -> FP8Weight | None:
    """Return the bytes of the checkpoint that a frozen weight was loaded from.

    Args:
        weight: beside which `remember_scales` may have put scales.
    Returns:
        The bytes and scales; None if they are not known, or the weight was changed since.
    """
    scales = vars(weight).pop(_SCALES, None)
    return None if scales is None else bytes_behind(weight.detach(), *scales)


def _spread(weight: FP8Weight, rows: slice) -> Tensor:
    """Return the scales of the elements of some rows: (rows, K), or what broadcasts to it."""
    scale, (height, width) = weight.scale, weight.block
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    index = torch.arange(rows.start, rows.stop, device=scale.device) // height
    scale = scale[index]
    cols = weight.qdata.shape[1]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, 1)[:, :cols]
