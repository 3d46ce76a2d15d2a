"""`UnshardedFloat8Weight`: a weight whose shards FSDP2 has all-gathered as FP8 bytes.

`Float8Linear` runs its GEMMs on the payload as it is. Whoever else reads the weight gets it
dequantized, in the dtype that it would have had; whoever writes it gets an error, for the values
belong to the sharded parameter.

FSDP frees what it gathered by resizing the storage and fills it again at the next all-gather, so a
weight and its aliases share one `Payload`, whose scale is replaced then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize_layouts, transposed
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.base import Payloads, QuantizableTensor, written_values

_EXPONENT_SHIFT = 23


@dataclass
class Payload:
    """The FP8 bytes of a whole weight (N, K).

    Attributes:
        qdata: (N, K) FP8, a view of what FSDP has gathered.
        scale: float32 as of `QuantizedTensor`; or uint8, powers of two as E8M0 bytes, a view of
            what FSDP has gathered.
        spec: how it was cast.
        shard: returns this rank's rows before they were cast, and the first of them; or None.
    """

    qdata: Tensor
    scale: Tensor
    spec: CastSpec
    shard: Callable[[], tuple[Tensor, int]] | None = None


class UnshardedFloat8Weight(QuantizableTensor):
    """A weight (N, K), read-only, in FP8; reads as a tensor of another dtype.

    Attributes:
        payload: shared with all aliases.
    """

    payload: Payload
    views = (*QuantizableTensor.views, torch.ops.aten.as_strided.default)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, payload: Payload, dtype: torch.dtype) -> "UnshardedFloat8Weight":
        self: UnshardedFloat8Weight = torch.Tensor._make_wrapper_subclass(
            cls, payload.qdata.shape, dtype=dtype, device=payload.qdata.device
        )
        self.payload = payload
        return self

    def quantize(
        self, quantizer: Any, *, rowwise: bool, columnwise: bool, grad_output: Tensor | None = None
    ) -> Payloads:
        """The payloads as they were gathered."""
        spec = quantizer.spec
        row = gathered_rowwise(self, spec)
        col = transposed_or_recast(row, spec, grad_output) if columnwise else None
        return row if rowwise else None, col

    def before_cast(
        self, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> tuple[Tensor, QuantizedTensor | None, QuantizedTensor | None, int] | None:
        """This rank's shard, whose rows are a part of the payloads'."""
        if self.payload.shard is None:
            return None
        shard, first = self.payload.shard()
        return shard, row, col, first

    def rowwise(self) -> QuantizedTensor:
        """The weight, quantized along K."""
        return gathered_rowwise(self, self.payload.spec)

    def columnwise(self) -> QuantizedTensor:
        """The transposed weight, (K, N), quantized along N; see `transposed_or_recast`."""
        return transposed_or_recast(self.rowwise(), self.payload.spec)

    def dequantize(self) -> Tensor:
        """A plain tensor of this shape and dtype."""
        return dequantize(self.rowwise(), self.dtype)

    def alias(self, shape: Any) -> "UnshardedFloat8Weight":
        assert tuple(shape) == tuple(self.shape)
        return UnshardedFloat8Weight(self.payload, self.dtype)

    def check_gathered(self) -> None:
        """Raises RuntimeError where FSDP has freed it."""
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
        payload = Payload(inner["qdata"], inner["scale"], spec)
        return UnshardedFloat8Weight(payload, dtype)

    @property
    def qdata(self) -> Tensor:
        return self.payload.qdata

    @property
    def scale(self) -> Tensor:
        return self.payload.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = result = self.dequantize()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        shape = tuple(self.shape)
        return f"UnshardedFloat8Weight(shape={shape}, dtype={self.dtype}, {self.payload.spec})"

    @classmethod
    def refuse_write(cls, func: Any, args: Any, kwargs: Any) -> None:
        values = written_values(func, args, kwargs)
        if any(isinstance(value, UnshardedFloat8Weight) for value in values):
            raise RuntimeError(
                f"{func._schema.name} writes an unsharded FP8 weight, which is a copy; write the "
                "sharded parameter, outside of forward, backward and unshard()"
            )


# Functions, for torch.compile takes a method of a tensor for an operator.
def gathered_rowwise(weight: UnshardedFloat8Weight, spec: CastSpec) -> QuantizedTensor:
    """The weight (N, K), quantized along K.

    Args:
        weight: gathered, and not freed since.
        spec: how it was cast.
    """
    if not torch.compiler.is_compiling():
        weight.check_gathered()
    scale = weight.scale
    if scale.dtype == torch.uint8:
        scale = powers_of_two(scale)
    return QuantizedTensor(weight.qdata, scale, spec.granularity)


def transposed_or_recast(
    row: QuantizedTensor, spec: CastSpec, grad_output: Tensor | None = None
) -> QuantizedTensor:
    """The transpose (C, R), quantized along R, of what was gathered as (R, C), quantized along C.

    The very payload, transposed, where a scale belongs to as many rows as columns. Else what the
    payload stands for is cast again; its scales are powers of two, which keeps every mantissa, so
    only what the other scale makes subnormal is rounded a second time.

    Args:
        row: what was gathered.
        spec: how it was cast.
        grad_output: in a backward; see `torch_fp8.ops.quantize.transposed`.
    """
    same = transposed(row, grad_output)
    if same is not None:
        return same
    # BF16 holds 4 significant bits times a power of two exactly.
    whole = dequantize(row, torch.bfloat16)
    _, col = quantize_layouts(whole, CastOptions.of(spec, rowwise=False, columnwise=True))
    assert col is not None
    return col


def exponent_bytes(scale: Tensor) -> Tensor:
    """Powers of two (float32) as E8M0 bytes, ``2 ** (byte - 127)``; non-finite ones as 255."""
    return (scale.view(torch.int32) >> _EXPONENT_SHIFT & 0xFF).to(torch.uint8)


def powers_of_two(scale: Tensor) -> Tensor:
    """`exponent_bytes` undone; 255 is infinite."""
    return (scale.to(torch.int32) << _EXPONENT_SHIFT).view(torch.float32)
