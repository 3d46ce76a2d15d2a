"""`UnshardedFloat8Weight`: a weight that FSDP2 has all-gathered as FP8 bytes.

`Float8Linear` runs its GEMMs directly on the payload. Other code that reads the weight gets it
dequantized, in the dtype that it would have otherwise. A write raises an error, because the values
belong to the sharded parameter.

FSDP frees gathered memory by resizing the storage, and fills it again at the next all-gather. So a
weight and its aliases share one `Payload`, whose scale is replaced at that time.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize_layouts, transposed
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.base import Payloads, QuantizableTensor, wrapper
from torch_fp8.tensor.readable import is_written

_EXPONENT_SHIFT = 23


@dataclass
class Payload:
    """The FP8 bytes of a whole weight (N, K).

    Attributes:
        qdata: (N, K) FP8, a view of the gathered memory.
        scale: float32 as in `QuantizedTensor`; or uint8 powers of two as E8M0 bytes, a view of the
            gathered memory.
        spec: the cast that made it.
        shard: a function that returns this rank's rows before the cast and the index of the first
            of them; or None.
    """

    qdata: Tensor
    scale: Tensor
    spec: CastSpec
    shard: Callable[[], tuple[Tensor, int]] | None = None


class UnshardedFloat8Weight(QuantizableTensor):
    """A gathered weight (N, K) in FP8, read-only; reads as a tensor of another dtype.

    Attributes:
        payload: the payload, shared with all aliases.
    """

    payload: Payload
    qdata = property(operator.attrgetter("payload.qdata"))
    scale = property(operator.attrgetter("payload.scale"))
    views = (*QuantizableTensor.views, torch.ops.aten.as_strided.default)

    __torch_function__ = torch.nn.Parameter.__torch_function__

    @staticmethod
    def __new__(cls, payload: Payload, dtype: torch.dtype) -> "UnshardedFloat8Weight":
        qdata = payload.qdata
        self: UnshardedFloat8Weight = wrapper(cls, qdata.shape, dtype, qdata.device)
        self.payload = payload
        return self

    def quantize(
        self, quantizer: Any, *, rowwise: bool, columnwise: bool, after: Tensor | None = None
    ) -> Payloads:
        """Return the gathered payloads."""
        spec = quantizer.spec
        row = gathered_rowwise(self, spec)
        col = transposed_or_recast(row, spec, after) if columnwise else None
        return row if rowwise else None, col

    def before_cast(self, payloads: Payloads) -> tuple[Tensor, Payloads, int] | None:
        """Return this rank's shard, whose rows are a part of the payloads' rows."""
        if self.payload.shard is None:
            return None
        shard, first = self.payload.shard()
        return shard, payloads, first

    def rowwise(self) -> QuantizedTensor:
        """The weight (N, K), quantized along K."""
        return gathered_rowwise(self, self.payload.spec)

    def dequantize(self) -> Tensor:
        """Return a plain tensor of this shape and dtype."""
        return dequantize(self.rowwise(), self.dtype)

    def reshaped(self, shape: Any) -> Any:
        assert tuple(shape) == tuple(self.shape)
        return type(self)(self.payload, self.dtype)

    def check_gathered(self) -> None:
        """Raise RuntimeError if FSDP has freed the weight."""
        if self.numel() and not self.qdata.untyped_storage().size():
            raise RuntimeError(
                "the unsharded weight was freed by FSDP; read it within the forward or backward of "
                "its module, or between unshard() and reshard()"
            )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], (self.payload.spec, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "UnshardedFloat8Weight":
        spec, dtype = context
        return UnshardedFloat8Weight(Payload(inner["qdata"], inner["scale"], spec), dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.dequantize())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)

    @classmethod
    def refuse_write(cls, func: Any, args: Any, kwargs: Any) -> None:
        values = {s.name: a for s, a in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = [values.get(s.name) for s in func._schema.arguments if is_written(s)]
        lists = [value if isinstance(value, (list, tuple)) else [value] for value in written]
        if any(isinstance(value, UnshardedFloat8Weight) for each in lists for value in each):
            raise RuntimeError(
                f"{func._schema.name} writes to an unsharded FP8 weight, which is a copy; "
                "write to the sharded parameter, outside forward, backward and unshard()"
            )


# Functions, because torch.compile treats a tensor's method as an operator.
def gathered_rowwise(weight: UnshardedFloat8Weight, spec: CastSpec) -> QuantizedTensor:
    """Return the weight (N, K), quantized along K.

    Args:
        weight: the gathered weight, not freed since.
        spec: the cast that made it.
    """
    if not torch.compiler.is_compiling():
        weight.check_gathered()
    scale = weight.scale
    if scale.dtype == torch.uint8:
        scale = powers_of_two(scale)
    return QuantizedTensor(weight.qdata, scale, spec.granularity)


def transposed_or_recast(
    row: QuantizedTensor, spec: CastSpec, after: Tensor | None = None
) -> QuantizedTensor:
    """Return the transpose (C, R), quantized along R, of (R, C) quantized along C.

    If each scale covers as many rows as columns, the codes are only transposed. Otherwise the
    dequantized payload is cast again. Its scales are powers of two, which preserves every mantissa,
    so only values that the new scale makes subnormal are rounded a second time.

    Args:
        row: the gathered payload.
        spec: the cast that made it.
        after: a tensor of backward; see `torch_fp8.ops.quantize.transposed`.
    """
    same = transposed(row, after)
    if same is not None:
        return same
    # BF16 holds 4 significant bits times a power of two exactly.
    whole = dequantize(row, torch.bfloat16)
    _, col = quantize_layouts(whole, CastOptions.of(spec, rowwise=False, columnwise=True))
    assert col is not None
    return col


def exponent_bytes(scale: Tensor) -> Tensor:
    """Return float32 powers of two as E8M0 bytes, ``2 ** (byte - 127)``; non-finite ones as 255."""
    return (scale.view(torch.int32) >> _EXPONENT_SHIFT & 0xFF).to(torch.uint8)


def powers_of_two(scale: Tensor) -> Tensor:
    """Invert `exponent_bytes`; 255 becomes infinity."""
    return (scale.to(torch.int32) << _EXPONENT_SHIFT).view(torch.float32)
