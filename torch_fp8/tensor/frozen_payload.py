"""`FrozenPayload`: the FP8 bytes of a weight that nobody trains, and how they are made.

``W ~= qdata.float() * scale``. Scales that this package makes are powers of two, so that BF16 holds
every value exactly; others' scales are kept as they are.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.payload_shape import scale_shape
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.halves import VERSIONS

DTYPE = torch.bfloat16
"""The dtype as which a frozen weight reads."""


@dataclass(eq=False)
class FrozenPayload:
    """The bytes of a weight (R, C), or of stacked ones (E, R, C), shared by all views of it.

    Attributes:
        qdata: (R, C) or (E, R, C) E4M3, contiguous.
        scale: float32 dequantization scale, (ceil(R / 128), ceil(C / 128)) or (); (E, R, 1) of
            stacked weights.
        spec: how it is cast: ``block_128x128`` or ``tensorwise``; ``rowwise`` if stacked.
        name: qualified name of the weight, for errors.
        thawed_dtype: the dtype that it had, and has again when it is thawed.
        owner: the layer whose weight it is, a weak reference; or None.
        first_row: None; or, of one rank's shard of a weight, the place of its first row in its
            block of 128 rows, the first of `scale`.
        rewrite: a function that quantizes new values of a shard with the other ranks, which share
            scales: they all write at the same time.
        version: another number after each write, which no version of a tensor tells, and that of no
            other weight.
        sharers: the payloads that `share` has given the same memory, this one among them; None:
            there are none.
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

    @property
    def quantized(self) -> QuantizedTensor:
        """Return the bytes as the GEMMs take them; not of a shard."""
        return QuantizedTensor(self.qdata, self.scale, self.spec.granularity)

    def dequantize(self, dtype: torch.dtype = DTYPE) -> Tensor:
        """Compute the values, (R, C)."""
        if not self.first_row:
            return dequantize(self.quantized, dtype)
        rows, cols = self.qdata.shape
        rows_of_blocks = self.scale.repeat_interleave(128, 0)
        scale = rows_of_blocks[self.first_row : self.first_row + rows]
        scale = scale.repeat_interleave(128, 1)[:, :cols]
        return (self.qdata.float() * scale).to(dtype)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Quantize `values` (R, C) into the memory at hand; equal values change no byte."""
        self.version = next(VERSIONS)
        if self.rewrite is not None:
            self.rewrite(values)
            return
        if not values.is_meta and self.equals(values):
            return
        row = quantize_stacked(values, self.spec)
        self.take_own_memory()
        self.qdata.copy_(row.qdata)
        self.scale.copy_(row.scale)

    def of_values(self, values: Tensor) -> "FrozenPayload":
        """Return a payload of other values (R, C) for this weight; equal ones keep the bytes."""
        if not values.is_meta and self.equals(values):
            return self
        row = quantize_stacked(values, self.spec)
        return self.of_bytes(_compact(row.qdata), row.scale)

    def of_bytes(self, qdata: Tensor, scale: Tensor) -> "FrozenPayload":
        """Return a payload of other bytes for the same weight."""
        version = next(VERSIONS)
        return replace(self, qdata=qdata, scale=scale, sharers=None, version=version)

    def equals(self, values: Tensor) -> bool:
        """Return whether `values` (R, C), in BF16, are what the weight reads as."""
        return torch.equal(values.to(DTYPE), self.dequantize())

    @property
    def is_shared(self) -> bool:
        """Return whether another payload that lives has the same memory."""
        place = self.qdata.data_ptr()
        others = (other for other in self.sharers or () if other is not self)
        return any(other.qdata.data_ptr() == place for other in others)

    def take_own_memory(self) -> None:
        """Make ready for a write of all elements, which the others of `share` must not see."""
        if self.is_shared:
            self.qdata, self.scale = torch.empty_like(self.qdata), torch.empty_like(self.scale)
        if self.sharers is not None:
            self.sharers.discard(self)
            self.sharers = None

    def share(self, other: "FrozenPayload") -> None:
        """Hold the memory of `other`, whose bytes are equal, in place of one's own.

        Each of both takes memory of its own again before it is written.
        """
        if other.sharers is None:
            other.sharers = weakref.WeakSet([other])
        other.sharers.add(self)
        self.sharers = other.sharers
        self.qdata, self.scale = other.qdata, other.scale

    @property
    def num_bytes(self) -> int:
        """Count the bytes of payload and scales."""
        return sum(t.numel() * t.element_size() for t in (self.qdata, self.scale))

    def copied(self) -> "FrozenPayload":
        """Return a copy of the bytes, which no layer owns."""
        qdata, scale = self.qdata.clone(), self.scale.clone()
        return replace(self, qdata=qdata, scale=scale, owner=None, rewrite=None, sharers=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenPayload":
        return self.copied()


def quantize_stacked(x: Tensor, spec: CastSpec) -> QuantizedTensor:
    """Cast x (..., C) to FP8 along its last dimension; rowwise, if it is no matrix."""
    if x.ndim == 2:
        return quantize(x, spec)
    assert spec.granularity == "rowwise"
    row = quantize(x.reshape(-1, x.shape[-1]), spec)
    return row._replace(qdata=row.qdata.view(x.shape), scale=row.scale.view(*x.shape[:-1], 1))


def freeze_tensor(
    weight: Tensor, spec: CastSpec, name: str, dtype: torch.dtype | None = None
) -> FrozenPayload:
    """Quantize a weight (R, C), or stacked ones (E, R, C).

    Args:
        weight: float32, bfloat16 or float16.
        spec: ``block_128x128`` or ``tensorwise``, E4M3; ``rowwise`` if stacked.
        name: qualified, for errors.
        dtype: its dtype when it is thawed; None: its own.
    """
    row = quantize_stacked(weight.detach(), spec)
    return FrozenPayload(_compact(row.qdata), row.scale, spec, name, dtype or weight.dtype)


def frozen_from_bytes(
    qdata: Tensor, scale: Tensor, spec: CastSpec, name: str, dtype: torch.dtype
) -> FrozenPayload:
    """Return the payload of bytes that somebody else has quantized.

    Args:
        qdata: (R, C) E4M3.
        scale: float32 dequantization scale, of the shape that `spec` says; any positive values.
        spec, name, dtype: as of `freeze_tensor`.
    Raises:
        ValueError: a scale of another shape or dtype.
    """
    shape: tuple[int, ...] = ()
    if spec.granularity != "tensorwise":
        rows, cols = qdata.shape
        shape = scale_shape(rows, cols, spec.granularity)
    if tuple(scale.shape) != shape or scale.dtype != torch.float32:
        raise ValueError(
            f"{name}: a weight {tuple(qdata.shape)} with {spec.granularity} scales takes float32 "
            f"scales {shape}, got {scale.dtype} {tuple(scale.shape)}"
        )
    return FrozenPayload(_compact(qdata), _compact(scale), spec, name, dtype)


def _compact(x: Tensor) -> Tensor:
    """A contiguous tensor whose memory holds nothing else."""
    x = x.contiguous()
    if x.is_meta or x.untyped_storage().nbytes() == x.numel() * x.element_size():
        return x
    return x.clone()
