"""`GatheredActivation`: an activation, or its gradient, that a group has gathered as FP8 bytes.

`Float8Linear` runs its GEMMs on the payload as it is: on the input that it needs whole in forward,
on the gradient of its output in backward. Whoever else reads such a tensor gets it dequantized,
rounded to FP8 as it is.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torch_fp8.activation_gather import Gather, Shards, pack_shard
from torch_fp8.gathered_weight import transposed_or_recast
from torch_fp8.quantize import QuantizedTensor, dequantize
from torch_fp8.recipe import CastSpec

_aten: Any = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


class GatheredInput:
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

    def start(self, kept: Tensor, scale: Tensor | None) -> None:
        """Issue the second gather, if there has to be one and none is under way."""
        if self.shards is not None and self._gather is None:
            self._gather = Gather(kept, self.shards, self.spec, scale)

    def col(self, kept: Tensor, scale: Tensor | None) -> QuantizedTensor:
        """The input transposed, (C, M), after `start`.

        Args:
            kept, scale: what `GatheredActivation.keep` returned.
        """
        if self.shards is None:
            assert scale is not None
            return transposed_or_recast(
                QuantizedTensor(kept, scale, self.spec.granularity), self.spec
            )
        assert self._gather is not None
        row = self._gather.result()
        self.users -= 1
        if self.users <= 0:
            self._gather = None
        return transposed_or_recast(row, self.spec)


class GatheredActivation(Tensor):
    """(..., C), read-only, in FP8; reads as a tensor of another dtype.

    Attributes:
        gather: of its shards, maybe still under way; shared with all aliases.
        source: what backward needs of it.
    """

    gather: Gather
    source: GatheredInput

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, gather: Gather, source: GatheredInput, shape: torch.Size, dtype: torch.dtype
    ) -> "GatheredActivation":
        self: GatheredActivation = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=gather.message.device
        )
        self.gather, self.source = gather, source
        return self

    def row(self) -> QuantizedTensor:
        """As a matrix (M, C), quantized along C."""
        return self.gather.result()

    def col(self) -> QuantizedTensor:
        """The matrix transposed, (C, M), quantized along M.

        With one scale the very payload, transposed. Else what the payload stands for is cast again;
        scales are powers of two, which keeps every mantissa, so only what the other scale makes
        subnormal is rounded a second time.
        """
        return transposed_or_recast(self.row(), self.gather.spec)

    def keep(self) -> tuple[Tensor, Tensor | None]:
        """What to save for a wgrad in backward: bytes or payload, and the scale if it has one."""
        self.source.users += 1
        if self.source.shards is not None:
            return self.gather.message, self.gather.scale
        row = self.row()
        return row.qdata, row.scale

    def dequantize(self) -> Tensor:
        """A plain tensor of this shape and dtype."""
        return dequantize(self.row(), self.dtype).view(self.shape)

    def __coerce_same_metadata_as_tangent__(self, *expected: Any) -> Any:
        raise NotImplementedError(
            "torch.compile does not trace what is gathered in FP8: leave the parallel layers out "
            "of it with torch.compiler.disable, or gather in 16 bits with "
            "FP8Config(communication='off')"
        )

    def __repr__(self) -> str:
        shape = tuple(self.shape)
        return f"GatheredActivation(shape={shape}, dtype={self.dtype}, {self.gather.spec})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        x = args[0] if args else None
        if isinstance(x, GatheredActivation):
            shape = _view_shape(func, x, args)
            if shape is not None:
                return GatheredActivation(x.gather, x.source, shape, x.dtype)
        plain = {name: _plain(value) for name, value in (kwargs or {}).items()}
        return func(*_plain(args), **plain)


def gather_activation(
    shard: Tensor,
    shards: Shards,
    spec: CastSpec,
    scale: Tensor | None,
    dtype: torch.dtype,
    *,
    gather_again: bool = False,
) -> GatheredActivation:
    """Cast this rank's part and start to gather all of them.

    Args:
        shard, shards, spec, scale: see `pack_shard`.
        dtype: that the result shall have for those who read it.
        gather_again: whether backward gathers it again instead of keeping it.
    """
    message = pack_shard(shard, shards, spec, scale)
    source = GatheredInput(spec, shards if gather_again else None)
    return GatheredActivation(Gather(message, shards, spec, scale), source, shards.shape, dtype)


def _view_shape(func: Any, x: Tensor, args: tuple[Any, ...]) -> torch.Size | None:
    """The new shape, where `func` makes a view that keeps the last dimension; else None."""
    if func in _ALIASES:
        return x.shape
    if func not in _VIEWS:
        return None
    size = list(args[1])
    if -1 in size and x.numel():
        size[size.index(-1)] = x.numel() // -math.prod(size)
    keeps = bool(size) and size[-1] == x.shape[-1] and math.prod(size) == x.numel()
    return torch.Size(size) if keeps else None


def _plain(value: Any) -> Any:
    if isinstance(value, GatheredActivation):
        return value.dequantize()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(v) for v in value)
    return value
