"""All-gathers of FP8 bytes, and their result, `AllGatheredFloat8Tensor`.

Under sequence parallelism each rank has a part of the tokens, and a linear layer needs all of them.
Each rank casts its part and sends one message. A single scale for the whole tensor is agreed on
before (`torch_fp8.quantization.scaling.group_amax`). Scales of rows and blocks, powers of two,
follow the payload as exponent bytes.

`Float8Linear` runs its GEMMs directly on the payload: on the gathered input in forward, and on the
gathered gradient of its output in backward. Other code that reads such a tensor gets it
dequantized, with the values rounded to FP8.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fp8.distributed.averaging import all_gather
from torch_fp8.distributed.fsdp.unsharded_weight import (
    exponent_bytes,
    powers_of_two,
    transposed_or_recast,
)
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.payload_shape import scale_shape
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.base import Payloads, QuantizableTensor, SavedInput, wrapper


class Shards(NamedTuple):
    """The distribution of a tensor over a group's ranks, as in DTensor's ``Shard(dim)``.

    Attributes:
        shape: the shape of the whole tensor.
        dim: the dimension that is divided into parts of ceil(size / ranks); the last part may be
            smaller.
        group: the process group.
    """

    shape: torch.Size
    dim: int
    group: Any

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a full part."""
        size = -(-self.shape[self.dim] // dist.get_world_size(self.group))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def pack_shard(
    quantized: QuantizedTensor, shape: torch.Size, shards: Shards, spec: CastSpec
) -> Tensor:
    """Return one rank's message: its part in FP8, followed by the exponents of its scales.

    Args:
        quantized: the part as a matrix; a tensorwise scale must be equal on all ranks.
        shape: the shape (..., C) of the part.
        shards: the distribution of the parts.
        spec: format and granularity.
    Returns:
        (B,) uint8, with the same length on every rank.
    """
    parts = [_padded(quantized.qdata.view(torch.uint8).view(shape), shards)]
    if spec.granularity != "tensorwise":
        exponents = exponent_bytes(quantized.scale)
        _, per_row = scale_shape(1, shape[-1], spec.granularity)
        parts.append(_padded(exponents.reshape(*shape[:-1], per_row), shards))
    return parts[0].view(-1) if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])


class Gather:
    """An all-gather of messages in flight; `result` waits for it.

    Args:
        message: the result of `pack_shard`.
        shards, spec: the arguments of `pack_shard`.
        scale: () float32 scale of all parts if tensorwise; else None.
    Attributes:
        part: this rank's part as a matrix, and its payload, for a monitor; or None.
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
        """Return the whole tensor as a matrix (M, C), quantized along C."""
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
            _, per_row = scale_shape(1, cols, self.spec.granularity)
            exponents = self._joined(self._output[:, size:], per_row)
            scale = powers_of_two(exponents).flatten(0, -2)
        # (..., C) -> (M, C)
        return QuantizedTensor(qdata.flatten(0, -2), scale, self.spec.granularity)

    def _joined(self, parts: Tensor, last: int) -> Tensor:
        """Join parts (ranks, bytes) to the whole with `last` bytes a row, without padding."""
        dim = self.shards.dim
        merged = [*self.shards.part[:-1], last]
        # (ranks, ..., part, ...) -> (..., ranks, part, ...) -> (..., whole, ...)
        whole = parts.view(parts.shape[0], *merged).movedim(0, dim)
        merged[dim] *= parts.shape[0]
        whole = whole.reshape(merged)
        return whole.narrow(dim, 0, self.shards.shape[dim]).contiguous()


def _padded(part: Tensor, shards: Shards) -> Tensor:
    """Return a uint8 part zero-padded to the size of a full part."""
    missing = shards.part[shards.dim] - part.shape[shards.dim]
    if not missing:
        return part.contiguous()
    shape = list(part.shape)
    shape[shards.dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim=shards.dim)


class GatheredInput(SavedInput):
    """How backward gets a gathered input again: from a saved payload or from a second gather.

    All layers that share the input share one object, so the input is gathered once for all of them.

    Args:
        spec: the cast of the input.
        shards: the distribution of the parts if the rank's own message was saved, or None if the
            whole payload was saved.
    """

    def __init__(self, spec: CastSpec, shards: Shards | None) -> None:
        self.spec, self.shards = spec, shards
        self.users = 0
        self._gather: Any = None

    def start(self, qdata: Tensor, scale: Tensor | None) -> None:
        """Issue the second gather, if one is needed and none is in flight."""
        if self.shards is not None and self._gather is None:
            self._gather = Gather(qdata, self.shards, self.spec, scale)

    def columnwise(self, qdata: Tensor, scale: Tensor | None) -> QuantizedTensor:
        """Return the transposed input (C, M), quantized along M; call `start` first."""
        if self.shards is None:
            row = QuantizedTensor(qdata, scale, self.spec.granularity)
        else:
            row = self._gather.result()
            self.users -= 1
            if self.users <= 0:
                self._gather = None
        return transposed_or_recast(row, self.spec)


class AllGatheredFloat8Tensor(QuantizableTensor):
    """A gathered tensor (..., C) in FP8, read-only; reads as a tensor of another dtype.

    Attributes:
        gather: the gather of its shards, possibly still in flight; shared with all aliases.
        source: the source from which backward gets the tensor.
    """

    gather: Gather
    source: GatheredInput

    __torch_function__ = torch.nn.Parameter.__torch_function__

    @staticmethod
    def __new__(
        cls, gather: Gather, source: GatheredInput, shape: torch.Size, dtype: torch.dtype
    ) -> "AllGatheredFloat8Tensor":
        self: AllGatheredFloat8Tensor = wrapper(cls, shape, dtype, gather.message.device)
        self.gather, self.source = gather, source
        return self

    def rowwise(self) -> QuantizedTensor:
        """Return the tensor as a matrix (M, C), quantized along C."""
        return self.gather.result()

    def columnwise(self) -> QuantizedTensor:
        """Return the transposed matrix (C, M), quantized along M.

        With a single scale the codes are only transposed. Otherwise the dequantized payload is cast
        again. Its scales are powers of two, which preserves every mantissa, so only values that the
        new scale makes subnormal are rounded a second time.
        """
        return transposed_or_recast(self.rowwise(), self.gather.spec)

    def quantize(
        self, quantizer: Any, *, rowwise: bool, columnwise: bool, after: Tensor | None = None
    ) -> Payloads:
        """Return the gathered payloads, whatever scale the layer would use."""
        return self.rowwise() if rowwise else None, self.columnwise() if columnwise else None

    def before_cast(self, payloads: Payloads) -> tuple[Tensor, Payloads, int] | None:
        """Return this rank's part and its gathered bytes, from which all payloads are made."""
        row, _ = payloads
        if self.gather.part is None or (row is not None and row is not self.gather.result()):
            return None
        source, payload = self.gather.part
        return source, (payload, None), 0

    def saved_for_backward(self) -> tuple[Tensor, Tensor | None, SavedInput]:
        """Return the rank's own bytes or the whole payload, the scale (or None), and the source."""
        self.source.users += 1
        if self.source.shards is not None:
            return self.gather.message, self.gather.scale, self.source
        row = self.rowwise()
        return row.qdata, row.scale, self.source

    def reshaped(self, shape: Any) -> "AllGatheredFloat8Tensor":
        return AllGatheredFloat8Tensor(self.gather, self.source, torch.Size(shape), self.dtype)

    def dequantize(self) -> Tensor:
        """Return a plain tensor of this shape and dtype."""
        return dequantize(self.rowwise(), self.dtype).view(self.shape)

    def __coerce_same_metadata_as_tangent__(self, *expected: Any) -> Any:
        raise NotImplementedError(
            "torch.compile cannot trace FP8 gathers: exclude the parallel layers with "
            "torch.compiler.disable, or gather in 16 bits with FP8Config(communication='off')"
        )


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
    """Cast this rank's part and start to gather all parts.

    Args:
        shard: (..., C) float32, bfloat16 or float16, this rank's part.
        shards: the distribution of the parts.
        spec: format and granularity.
        scale: () float32, equal on all ranks, if tensorwise; else None.
        dtype: the dtype that the result reads as.
        gather_again: whether backward gathers again instead of keeping the result.
        keep_part: whether the result keeps `shard`, for a monitor.
    """
    rows = shard.reshape(-1, shard.shape[-1])  # (..., C) -> (rows, C)
    quantized = quantize(rows, spec, scale)
    source = GatheredInput(spec, shards if gather_again else None)
    gather = Gather(pack_shard(quantized, shard.shape, shards, spec), shards, spec, scale)
    gather.part = (rows, quantized) if keep_part else None
    return AllGatheredFloat8Tensor(gather, source, shards.shape, dtype)
