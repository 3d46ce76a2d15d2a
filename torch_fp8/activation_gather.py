"""All-gathers of FP8 bytes: each rank casts its part of a tensor, one message has what travels.

Under sequence parallelism each rank has a part of the tokens, and a linear layer needs all of them.
With one scale for the tensor, that one is agreed on before (`group_amax`); scales of rows and
blocks, powers of two, follow the payload as exponent bytes.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from torch_fp8.collectives import all_gather
from torch_fp8.payload_shape import BLOCK_SHAPE
from torch_fp8.quantize import QuantizedTensor, quantize
from torch_fp8.recipe import CastSpec
from torch_fp8.scaling import tensor_amax


class Shards(NamedTuple):
    """How the parts of a tensor lie on the ranks of a group, as DTensor's ``Shard(dim)``.

    Attributes:
        shape: of the whole tensor.
        dim: along which it is divided, in parts of ceil(size / ranks); the last may be less.
        group: the ranks.
    """

    shape: torch.Size
    dim: int
    group: Any

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of a full part."""
        size = -(-self.shape[self.dim] // dist.get_world_size(self.group))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        full, rank = self.part[self.dim], dist.get_rank(self.group)
        size = min(max(self.shape[self.dim] - rank * full, 0), full)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def group_amax(x: Tensor, group: Any) -> Tensor:
    """max |x| over all ranks of `group`, () float32; not finite where any element is not.

    Backends differ in the maximum of a number and NaN, not in that of a number and infinity.
    """
    amax = tensor_amax(x)
    if group is not None:
        amax = amax.nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def pack_shard(shard: Tensor, shards: Shards, spec: CastSpec, scale: Tensor | None) -> Tensor:
    """One rank's message: its part in FP8, then the exponents of its scales.

    Args:
        shard: (..., C) float32, bfloat16 or float16, of ``shards.local_shape()``.
        shards: where it belongs.
        spec: format and granularity.
        scale: () float32, equal on all ranks, for tensorwise; else None.
    Returns:
        (B,) uint8, as long on every rank.
    """
    quantized = quantize(shard.reshape(-1, shard.shape[-1]), spec, scale)
    payload = quantized.qdata.view(torch.uint8).view(shard.shape)
    parts = [_padded(payload, shards)]
    if spec.granularity != "tensorwise":
        exponents = (quantized.scale.view(torch.int32) >> 23).to(torch.uint8)
        per_row = _scales_per_row(spec, shard.shape[-1])
        parts.append(_padded(exponents.reshape(*shard.shape[:-1], per_row), shards))
    return parts[0].view(-1) if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])


class Gather:
    """An all-gather of messages under way; `result` waits for it.

    Args:
        message: of `pack_shard`.
        shards, spec, scale: as given to it.
    """

    def __init__(
        self, message: Tensor, shards: Shards, spec: CastSpec, scale: Tensor | None
    ) -> None:
        self.message, self.shards, self.spec, self.scale = message, shards, spec, scale
        ranks = dist.get_world_size(shards.group)
        self._output = message.new_empty(ranks, message.numel())
        self._work = all_gather(self._output, message, group=shards.group, async_op=True)
        self._result: QuantizedTensor | None = None

    def result(self) -> QuantizedTensor:
        """The whole tensor as a matrix (M, C), quantized along C."""
        if self._result is None:
            self._work.wait()
            self._result = self._unpack()
            del self._output, self._work
        return self._result

    def _unpack(self) -> QuantizedTensor:
        part, cols = self.shards.part, self.shards.shape[-1]
        size = math.prod(part)
        qdata = self._joined(self._output[:, :size], part[-1]).view(self.spec.format.dtype)
        scale = self.scale
        if scale is None:
            exponents = self._joined(self._output[:, size:], _scales_per_row(self.spec, cols))
            bits = exponents.to(torch.int32) << 23
            scale = bits.view(torch.float32).flatten(0, -2)
        return QuantizedTensor(qdata.flatten(0, -2), scale, self.spec.granularity)

    def _joined(self, parts: Tensor, last: int) -> Tensor:
        """(ranks, bytes of a part) -> the whole with `last` bytes in a row, without the padding."""
        dim = self.shards.dim
        merged = [*self.shards.part[:-1], last]
        whole = parts.view(parts.shape[0], *merged).movedim(0, dim)
        merged[dim] *= parts.shape[0]
        whole = whole.reshape(merged)
        return whole.narrow(dim, 0, self.shards.shape[dim]).contiguous()


def waited(x: Tensor) -> Tensor:
    """A tensor itself, where a collective of torch's may still be filling it."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def _scales_per_row(spec: CastSpec, cols: int) -> int:
    return 1 if spec.granularity == "rowwise" else -(-cols // BLOCK_SHAPE[spec.granularity][1])


def _padded(part: Tensor, shards: Shards) -> Tensor:
    """A part, uint8, filled up to the size of a full one."""
    missing = shards.part[shards.dim] - part.shape[shards.dim]
    if not missing:
        return part.contiguous()
    shape = list(part.shape)
    shape[shards.dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim=shards.dim)
