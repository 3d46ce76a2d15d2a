"""`FrozenPayload`: the FP8 bytes of a frozen weight, from a weight or from an FP8 checkpoint.

``W ~= qdata.float() * scale``, whatever a format calls the scale (``weight_scale_inv`` is a
multiplier, too). Scales computed by this package are powers of two, so that BF16 holds every value
exactly. Scales from other sources are kept unchanged.

A checkpoint has E4M3 codes and float32 scales of rectangular blocks. The shape of the scales gives
the size of the blocks: () or (1, 1) for one scale, (N, 1) for one per row, (ceil(N / 128),
ceil(K / 128)) for blocks of 128 x 128, (N, ceil(K / 32)) for groups of 32. N are output features,
K input features.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize_stacked
from torch_fp8.quantization.block_scaled import row_parts
from torch_fp8.quantization.payload_shape import scale_shape
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.halves import VERSIONS

DTYPE = torch.bfloat16
"""Dtype that a frozen weight reads as."""


@dataclass(eq=False)
class FrozenPayload:
    """The bytes of a weight (R, C), or of stacked weights (E, R, C), shared by all its views.

    Attributes:
        qdata: (R, C) or (E, R, C) E4M3, contiguous.
        scale: float32 dequantization scale, (ceil(R / 128), ceil(C / 128)) or (); (E, R, 1) for
            stacked weights.
        spec: cast of the weight: ``block_128x128`` or ``tensorwise``; ``rowwise`` if stacked.
        name: qualified name of the weight, for errors.
        thawed_dtype: dtype of the weight before it was frozen and after it is thawed.
        owner: weak reference to the layer that owns the weight, or None.
        first_row: for one rank's shard, row of its first element within the block of 128 rows that
            the first row of `scale` covers, or None if not a shard.
        rewrite: function that quantizes new values of a shard together with the other ranks, with
            which it shares scales, so that all ranks have to write at the same time; or None.
        version: unique number, renewed by each write; tensor versions do not see these writes.
        sharers: payloads that share this memory by `share`, including this one, or None if not
            shared.
        changes: last changes since a copy, see `torch_fp8.tensor.frozen_weight`.
    """

    qdata: Tensor
    scale: Tensor
    spec: CastSpec
    name: str = "weight"
    thawed_dtype: torch.dtype = DTYPE
    owner: Any = None
    first_row: int | None = None
    rewrite: Callable[[Tensor], None] | None = None
    sharers: "weakref.WeakSet[FrozenPayload] | None" = None
    version: int = field(default_factory=lambda: next(VERSIONS))
    changes: list[Any] = field(default_factory=list, init=False, repr=False)

    @property
    def quantized(self) -> QuantizedTensor:
        """The bytes as the payload of a GEMM; not for a shard."""
        return QuantizedTensor(self.qdata, self.scale, self.spec.granularity)

    def dequantize(self, dtype: torch.dtype = DTYPE) -> Tensor:
        """Compute the values (R, C) in `dtype`."""
        if not self.first_row:
            return dequantize(self.quantized, dtype)
        scale = _spread(self.scale, FROZEN_BLOCK, self.first_row, *self.qdata.shape)
        return (self.qdata.float() * scale).to(dtype)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Quantize `values` (R, C) in place; equal values change no byte."""
        self.version, self.changes = next(VERSIONS), []
        if self.rewrite is not None:
            self.rewrite(values)
            return
        if self.equals(values):
            return
        row = quantize_stacked(values, self.spec)
        self.take_own_memory()
        self.qdata.copy_(row.qdata)
        self.scale.copy_(row.scale)

    def of_values(self, values: Tensor) -> "FrozenPayload":
        """Return a payload with other values (R, C) for this weight; equal values return self."""
        if self.equals(values):
            return self
        row = quantize_stacked(values, self.spec)
        return self.of_bytes(_compact(row.qdata), row.scale)

    def of_bytes(self, qdata: Tensor, scale: Tensor) -> "FrozenPayload":
        """Return a payload with other bytes for the same weight."""
        return replace(self, qdata=qdata, scale=scale, sharers=None, version=next(VERSIONS))

    def equals(self, values: Tensor) -> bool:
        """Return whether the weight reads as `values` (R, C), rounded to BF16; False on meta."""
        return not values.is_meta and torch.equal(values.to(DTYPE), self.dequantize())

    @property
    def is_shared(self) -> bool:
        """Whether another living payload has the same memory."""
        place = self.qdata.data_ptr()
        others = (other for other in self.sharers or () if other is not self)
        return any(other.qdata.data_ptr() == place for other in others)

    def take_own_memory(self) -> None:
        """Allocate separate memory if this is shared, before all elements are written."""
        if self.is_shared:
            self.qdata, self.scale = torch.empty_like(self.qdata), torch.empty_like(self.scale)
        if self.sharers is not None:
            self.sharers.discard(self)
            self.sharers = None

    def share(self, other: "FrozenPayload") -> None:
        """Use the memory of `other`, whose bytes are equal, instead of separate memory.

        The memory is copied on write: either payload allocates its own before it is written.
        """
        if other.sharers is None:
            other.sharers = weakref.WeakSet([other])
        other.sharers.add(self)
        self.sharers = other.sharers
        self.qdata, self.scale = other.qdata, other.scale

    @property
    def num_bytes(self) -> int:
        """Number of bytes of codes and scales."""
        return self.qdata.nbytes + self.scale.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenPayload":
        """Return a copy that no layer owns."""
        qdata, scale = self.qdata.clone(), self.scale.clone()
        return replace(self, qdata=qdata, scale=scale, owner=None, rewrite=None, sharers=None)


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

    def scale_for(self, spec: CastSpec) -> Tensor | None:
        """Return the scale of a frozen weight with these codes, or None if its blocks do not fit.

        Args:
            spec: cast of the frozen weight, ``block_128x128`` or ``tensorwise``. If this weight has
                a single scale, each block gets it.
        """
        if spec.granularity == "tensorwise":
            return self.scale.reshape(()) if self.scale.numel() == 1 else None
        if self.scale.numel() == 1:
            rows, cols = self.qdata.shape
            return self.scale.reshape(1, 1).expand(scale_shape(rows, cols, spec.granularity))
        return self.scale if self.block == FROZEN_BLOCK else None

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of rows with their float32 values (r, K).

        A value is the code times the scale, rounded once (relative error 2^-24).
        """
        for rows in row_parts(*self.qdata.shape):
            codes = self.qdata[rows]
            scale = _spread(self.scale, self.block, rows.start, *codes.shape)
            yield rows, codes.float().mul_(scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K) in `dtype`, rounded once more for BF16 or float16."""
        whole = torch.empty(self.qdata.shape, dtype=dtype, device=self.qdata.device)
        for rows, value in self.parts():
            whole[rows] = value
        return whole


def scale_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape (ceil(N / R), ceil(K / C)) of the scales of a weight (N, K)."""
    return tuple(-(-n // side) for n, side in zip(shape, block, strict=True))


def _spread(scale: Tensor, block: tuple[int, int], first: int, rows: int, cols: int) -> Tensor:
    """Return a scale for each element of some rows: (rows, K), or a shape that broadcasts to it."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    height, width = block
    scale = scale[torch.arange(first, first + rows, device=scale.device) // height]
    # (rows, ceil(K / C))
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, 1)[:, :cols]


def freeze_tensor(
    weight: Tensor | FP8Weight, spec: CastSpec, name: str, dtype: torch.dtype | None = None
) -> FrozenPayload:
    """Quantize a weight (R, C), or stacked weights (E, R, C).

    Args:
        weight: float32, bfloat16 or float16; or the weight of an FP8 checkpoint, whose codes are
            kept if its blocks fit.
        spec: cast, ``block_128x128`` or ``tensorwise`` in E4M3; ``rowwise`` if stacked.
        name: qualified name, for errors.
        dtype: dtype of the weight when it is thawed, or None for its current dtype, which is BF16
            for an FP8 checkpoint.
    """
    if isinstance(weight, FP8Weight):
        scale = weight.scale_for(spec)
        if scale is not None:
            return FrozenPayload(_compact(weight.qdata), _compact(scale), spec, name)
        weight, dtype = weight.dequantize(), DTYPE
    row = quantize_stacked(weight.data, spec)
    return FrozenPayload(_compact(row.qdata), row.scale, spec, name, dtype or weight.dtype)


def _compact(x: Tensor) -> Tensor:
    """Return x as a contiguous tensor whose storage contains nothing else."""
    x = x.contiguous()
    if x.is_meta or x.untyped_storage().nbytes() == x.numel() * x.element_size():
        return x
    return x.clone()
