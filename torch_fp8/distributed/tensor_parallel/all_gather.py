"""All-gathers of FP8 bytes, and `AllGatheredFloat8Tensor`, the tensor that they make.

Under sequence parallelism each rank has a part of the tokens, and a linear layer needs all of them.
Each rank casts its part, and one message has what travels. With one scale for the tensor, that one
is agreed on before (`torch_fp8.quantization.scaling.group_amax`); scales of rows and blocks, powers
of two, follow the payload as exponent bytes.

`Float8Linear` runs its GEMMs on the payload as it is: on the input that it needs whole in forward,
on the gradient of its output in backward. Whoever else reads such a tensor gets it dequantized,
rounded to FP8 as it is.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fp8.distributed.collectives import all_gather
from torch_fp8.distributed.fsdp.unsharded_weight import (
    exponent_bytes,
    powers_of_two,
    transposed_or_recast,
)
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.payload_shape import BLOCK_SHAPE
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.base import Payloads, QuantizableTensor, SavedInput


class Shards(NamedTuple):
    """How the parts of a tensor lie on the ranks of a group, as DTensor's ``Shard(dim)``.

    Attributes:
        shape: the shape of the whole tensor.
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


def pack_shard(
    quantized: QuantizedTensor, shape: torch.Size, shards: Shards, spec: CastSpec
) -> Tensor:
    """One rank's message: its part in FP8, then the exponents of its scales.

    Args:
        quantized: part as a matrix, with a scale that is equal on all ranks if tensorwise.
        shape: shape (..., C) of the part.
        shards: where it belongs.
        spec: format and granularity.
    Returns:
        (B,) uint8, as long on every rank.
    """
    payload = quantized.qdata.view(torch.uint8).view(shape)
    parts = [_padded(payload, shards)]
    if spec.granularity != "tensorwise":
        exponents = exponent_bytes(quantized.scale)
        per_row = _scales_per_row(spec, shape[-1])
        parts.append(_padded(exponents.reshape(*shape[:-1], per_row), shards))
    return parts[0].view(-1) if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])


class Gather:
    """An all-gather of messages under way; `result` waits for it.

    Args:
        message: what `pack_shard` returned.
        shards, spec: as given to it.
        scale: () float32 of all parts, for tensorwise; else None.

    Attributes:
        part: this rank's part as a matrix, and its payload, where somebody compares them; or None.
    """

    part: tuple[Tensor, QuantizedTensor] | None = None

    def __init__(
        self, message: Tensor, shards: Shards, spec: CastSpec, scale: Tensor | None
    ) -> None:
        self.message, self.shards, self.spec, self.scale = message, shards, spec, scale
        ranks = dist.get_world_size(shards.group)
        self._output = message.new_empty(ranks, message.numel())  # row r is rank r's
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
            scale = powers_of_two(exponents).flatten(0, -2)
        return QuantizedTensor(qdata.flatten(0, -2), scale, self.spec.granularity)

    def _joined(self, parts: Tensor, last: int) -> Tensor:
        """(ranks, bytes of a part) -> the whole with `last` bytes in a row, without the padding."""
        dim = self.shards.dim
        merged = [*self.shards.part[:-1], last]
        # (ranks, ..., part, ...) -> (..., ranks, part, ...) -> (..., whole, ...)
        whole = parts.view(parts.shape[0], *merged).movedim(0, dim)
        merged[dim] *= parts.shape[0]
        whole = whole.reshape(merged)
        return whole.narrow(dim, 0, self.shards.shape[dim]).contiguous()


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


class GatheredInput(SavedInput):
    """How backward comes by a gathered input again: it was kept, or it is gathered a second time.

    One object serves all layers that share the input, so that it is gathered once for all of them.

    Args:
        spec: how it was cast.
        shards: None: the whole payload was kept. Else the rank's own message was.
    """

    def __init__(self, spec: CastSpec, shards: Shards | None) -> None:
        self.spec, self.shards = spec, shards
        self.users = 0
        self._gather: Gather | None = None

    def start(self, qdata: Tensor, scale: Tensor | None) -> None:
        """Issue the second gather, if there has to be one and none is under way."""
        if self.shards is not None and self._gather is None:
            self._gather = Gather(qdata, self.shards, self.spec, scale)

    def columnwise(self, qdata: Tensor, scale: Tensor | None) -> QuantizedTensor:
        """The input transposed, (C, M), quantized along M, after `start`."""
        if self.shards is None:
            assert scale is not None
            return transposed_or_recast(
                QuantizedTensor(qdata, scale, self.spec.granularity), self.spec
            )
        assert self._gather is not None
        row = self._gather.result()
        self.users -= 1
        if self.users <= 0:
            self._gather = None
        return transposed_or_recast(row, self.spec)


class AllGatheredFloat8Tensor(QuantizableTensor):
    """(..., C), read-only, in FP8; reads as a tensor of another dtype.

    Attributes:
        gather: the gather of its shards, maybe still under way; shared with all aliases.
        source: what backward needs of it.
    """

    gather: Gather
    source: GatheredInput

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, gather: Gather, source: GatheredInput, shape: torch.Size, dtype: torch.dtype
    ) -> "AllGatheredFloat8Tensor":
        self: AllGatheredFloat8Tensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=gather.message.device
        )
        self.gather, self.source = gather, source
        return self

    def rowwise(self) -> QuantizedTensor:
        """Return the tensor as a matrix (M, C), quantized along C."""
        return self.gather.result()

    def columnwise(self) -> QuantizedTensor:
        """The matrix transposed, (C, M), quantized along M.

        With one scale the very payload, transposed. Else what the payload stands for is cast again;
        scales are powers of two, which keeps every mantissa, so only what the other scale makes
        subnormal is rounded a second time.
        """
        return transposed_or_recast(self.rowwise(), self.gather.spec)

    def quantize(
        self, quantizer: Any, *, rowwise: bool, columnwise: bool, grad_output: Tensor | None = None
    ) -> Payloads:
        """The payloads as they were gathered, whatever scale the layer would take."""
        return self.rowwise() if rowwise else None, self.columnwise() if columnwise else None

    def before_cast(
        self, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> tuple[Tensor, QuantizedTensor | None, QuantizedTensor | None, int] | None:
        """This rank's part, and its bytes that were gathered: all payloads are made of these."""
        if self.gather.part is None or (row is not None and row is not self.gather.result()):
            return None
        source, payload = self.gather.part
        return source, payload, None, 0

    def saved_for_backward(self) -> tuple[Tensor, Tensor | None, SavedInput]:
        """The rank's own bytes or the whole payload, and the scale if it has one."""
        self.source.users += 1
        if self.source.shards is not None:
            return self.gather.message, self.gather.scale, self.source
        row = self.rowwise()
        return row.qdata, row.scale, self.source

    def alias(self, shape: Any) -> "AllGatheredFloat8Tensor":
        return AllGatheredFloat8Tensor(self.gather, self.source, torch.Size(shape), self.dtype)

    def dequantize(self) -> Tensor:
        """A plain tensor of this shape and dtype."""
        return dequantize(self.rowwise(), self.dtype).view(self.shape)

    def __coerce_same_metadata_as_tangent__(self, *expected: Any) -> Any:
        raise NotImplementedError(
            "torch.compile cannot trace FP8 gathers: exclude the parallel layers with "
            "torch.compiler.disable, or gather in 16 bits with FP8Config(communication='off')"
        )

    def __repr__(self) -> str:
        shape = tuple(self.shape)
        return f"AllGatheredFloat8Tensor(shape={shape}, dtype={self.dtype}, {self.gather.spec})"


def gather_activation(
    shard: Tensor,
    shards: Shards,
    spec: CastSpec,
    scale: Tensor | None,
    dtype: torch.dtype,
    *,
    gather_again: bool = False,
    keep_part: bool = False,
) -> AllGatheredFloat8Tensor:
    """Cast this rank's part and start to gather all of them.

    Args:
        shard: (..., C) float32, bfloat16 or float16, this rank's part.
        shards: where it belongs.
        spec: format and granularity.
        scale: () float32, equal on all ranks, for tensorwise; else None.
        dtype: the dtype of the result for those who read it.
        gather_again: whether backward gathers it again instead of keeping it.
        keep_part: whether the result keeps `shard`, for a monitor.
    """
    rows = shard.reshape(-1, shard.shape[-1])
    quantized = quantize(rows, spec, scale)
    message = pack_shard(quantized, shard.shape, shards, spec)
    source = GatheredInput(spec, shards if gather_again else None)
    gather = Gather(message, shards, spec, scale)
    gather.part = (rows, quantized) if keep_part else None
    return AllGatheredFloat8Tensor(gather, source, shards.shape, dtype)
