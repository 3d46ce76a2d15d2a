"""The FP8 all-gather of fused expert weights: each rank casts its own experts.

Sharding along dimension 0 gives each rank whole experts, so casts, transpositions and scales are
local, and no collective computes a scale. Forward gathers the payload that it multiplies, and
backward gathers the transposed payload, which has the same size. So a gathered weight is transposed
only if a forward runs again in backward, or if the weight stays gathered between the two.

Legend: E experts, R rows and C columns of a weight as it is stored.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.autograd.current_pass import is_traced
from torch_fp8.distributed.fsdp.all_gather import WeightGather, in_backward
from torch_fp8.distributed.fsdp.unsharded_weight import Payload, UnshardedFloat8Weight
from torch_fp8.nn.expert_storage import transposed_stacked
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.grouped_linear_function import cast_stacked
from torch_fp8.ops.quantize import QuantizedTensor, dequantize
from torch_fp8.tensor.base import wrapper
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.split_weight import stored


@dataclass
class StackedPayload(Payload):
    """The FP8 bytes of weights (E, R, C) or of their transposes (E, C, R), with one scale per row.

    Attributes:
        flipped: whether they are the bytes of the transposes.
        read: whether eager code has read them since the last forward's gather.
    """

    flipped: bool = False
    read: bool = False

    @property
    def quantized(self) -> QuantizedTensor:
        return QuantizedTensor(self.qdata, self.scale.contiguous(), self.spec.granularity)


class UnshardedExperts(UnshardedFloat8Weight):
    """Gathered, read-only FP8 weights (E, R, C) of experts; see `UnshardedFloat8Weight`."""

    payload: StackedPayload

    @staticmethod
    def __new__(cls, payload: StackedPayload, dtype: torch.dtype) -> "UnshardedExperts":
        qdata = payload.qdata
        shape = qdata.transpose(1, 2).shape if payload.flipped else qdata.shape
        self: UnshardedExperts = wrapper(cls, shape, dtype, qdata.device)
        self.payload = payload
        return self

    def stacked_payload(self, flip: bool) -> tuple[Tensor, Tensor]:
        """The payload as it was gathered, or its transpose."""
        self.check_gathered()
        payload = self.payload
        payload.read = payload.read or not is_traced()
        quantized = payload.quantized
        if payload.flipped != flip:
            quantized = transposed_stacked(quantized, payload.spec)
        return quantized.qdata, quantized.scale

    def dequantize(self) -> Tensor:
        """Return a plain tensor of this shape and dtype."""
        self.check_gathered()
        plain = dequantize(self.payload.quantized, self.dtype)
        return plain.transpose(1, 2).contiguous() if self.payload.flipped else plain

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], (self.payload.spec, self.dtype, self.payload.flipped)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "UnshardedExperts":
        spec, dtype, flipped = context
        payload = StackedPayload(inner["qdata"], inner["scale"], spec, flipped=flipped)
        return UnshardedExperts(payload, dtype)


class ExpertGather(WeightGather):
    """The gather of one fused expert weight; see `WeightGather`."""

    module: Any
    amax_shape = (0,)
    _unsharded: StackedPayload | None = None

    def pre(self, shard: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends: (experts, R * C) uint8, and the bytes of scales.

        Both layouts send as many scales as the longer one has, so that both gathers fill the same
        memory.
        """
        flip = self.module.is_transposed != (in_backward() and self._was_read)
        payload = self._payload(shard, flip)
        experts, rows, cols = payload.qdata.shape
        scale = payload.scale.view(experts, -1)  # (E, rows of this layout)
        scale = F.pad(scale, (0, max(rows, cols) - scale.shape[1])).contiguous()
        # (E, R, C) -> (E, R * C)
        codes = payload.qdata.view(torch.uint8).view(experts, rows * cols)
        return (codes, scale.view(torch.uint8)), flip

    def _payload(self, shard: Tensor, flip: bool) -> QuantizedTensor:
        """Return this rank's experts in FP8, or with `flip` their transposes."""
        values = stored(shard)
        payload = cast_stacked(values, self.spec, flip)
        observers = self.module.fp8.observers  # of a monitor
        if observers and not is_traced():
            observers[self.fsdp_param._module_info.param_name].weight(values, payload, flip)
        return payload

    @property
    def _was_read(self) -> bool:
        """Whether eager code has read the last forward's payload.

        A compiled graph has saved the payload's memory instead, and its backward must find it
        unchanged.
        """
        return self._unsharded is not None and self._unsharded.read

    def post(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, out: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weights, or fill `out` again."""
        flipped: bool = metadata
        experts, rows, cols = self.fsdp_param._orig_size
        shape = (experts, cols, rows) if flipped else (experts, rows, cols)
        qdata = outputs[0].view(shape).view(self.spec.format.dtype)
        # (E, longer of R and C) -> (E, rows of this layout, 1)
        scale = outputs[1].view(torch.float32).view(experts, -1)[:, : shape[1], None]
        if out is None:
            payload = StackedPayload(qdata, scale, self.spec, flipped=flipped)
            self._unsharded = payload
            return UnshardedExperts(payload, dtype), ()
        payload = self._unsharded = local(out).payload
        payload.qdata, payload.scale, payload.flipped = qdata, scale, flipped
        if flipped == self.module.is_transposed:  # a forward's layout
            payload.read = False
        return None


def is_expert_weight(module: Any, name: str) -> bool:
    """Return whether a parameter is a weight of fused experts that run in FP8."""
    return isinstance(module, Float8Experts) and name in module.fp8_weight_names


def why_not_gathered(param: Any) -> str | None:
    """Return why FSDP gathers an expert weight in high precision, or None if it gathers FP8.

    Args:
        param: FSDP's record of the weight.
    """
    if param._module_info.shared_modules:
        return "another module shares it"
    if param.fsdp_placement.dim != 0:
        return f"it is sharded along dimension {param.fsdp_placement.dim}, across experts"
    size = param.mesh_info.shard_mesh_size
    if size == 1:
        return "it is on one rank, where torch gathers only one tensor"
    if param._orig_size[0] % size:
        return f"{param._orig_size[0]} experts are not divisible by {size} ranks"
    return None
