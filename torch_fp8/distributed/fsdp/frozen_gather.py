"""Frozen weights sharded by FSDP2: each rank stores its rows only in FP8.

A shard uses one byte per element and is gathered as it is. Every rank has the scales of the whole
weight, one for each block of 128 x 128 elements. One collective computes them when the model is
connected, and again when all ranks write the weight; a block whose rows lie on two ranks has the
same scale on both.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.distributed.fsdp.all_gather import WeightGather, make_askable, make_scales
from torch_fp8.distributed.fsdp.expert_gather import (
    ExpertGather,
    is_expert_weight,
    why_not_gathered,
)
from torch_fp8.distributed.fsdp.split_weights import renew_unsharded
from torch_fp8.nn.expert_storage import transposed_stacked
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.quantize import QuantizedTensor, quantize_stacked
from torch_fp8.quantization.payload_shape import BLOCK_SHAPE
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_payload import FrozenPayload
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight


class FrozenGather(WeightGather):
    """The gather of one frozen weight, whose shards are stored in FP8."""

    wanted = True
    _written: Tensor | None = None

    def freeze(self) -> None:
        """Store this rank's rows only in FP8 from now on, with the scales of `make_scales`."""
        self._param_group.reshard()
        layer, shard = self.module, self.shard
        rows, dtype = shard.shape[0], shard.dtype
        qdata, scale = (x.to(shard.device) for x in self._quantized(shard.detach()))
        name = f"{layer.fp8.name}.{self.fsdp_param._module_info.param_name}".lstrip(".")
        of_layer = name, dtype, weakref.ref(layer), self._place_in_block(rows), self.rewrite
        frozen = Float8FrozenWeight(FrozenPayload(qdata, scale, self.spec, *of_layer))
        param = self.fsdp_param
        param.sharded_param._local_tensor = frozen
        param.sharded_param.requires_grad_(False)
        param._sharded_param_data = frozen.qdata.new_empty(0, dtype=dtype)
        param.reset_sharded_param = self._keep_shard
        make_askable(frozen, self)
        if param.offload_to_cpu:
            frozen.to = self._moved
        renew_unsharded(param)

    def _place_in_block(self, rows: int) -> int | None:
        """Return the position of this rank's first row in its block of 128 rows."""
        return self._first_row() % 128 if rows else 0

    def _quantized(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize this rank's rows with the scales that `make_scales` has computed.

        Returns:
            The bytes, and the scales of these rows.
        """
        scale: Any = self._scale
        if self.spec.granularity in BLOCK_SHAPE:
            first = self._first_row()
            scale = scale[first // 128 : -(-(first + rows.shape[0]) // 128)]
        return self._cast(rows).qdata[: rows.shape[0]].contiguous(), scale.contiguous()

    @property
    def shard(self) -> Tensor:
        """This rank's rows without padding; during `rewrite` the new values."""
        return super().shard if self._written is None else self._written

    def rewrite(self, values: Tensor) -> None:
        """Quantize new values; all ranks call it at the same time, each with its rows.

        A write to a DTensor is such a call on all ranks. If no rank's values differ, no byte
        changes.
        """
        payload: FrozenPayload = self.shard.payload
        differs = torch.tensor(
            [0.0 if payload.equals(values) else 1.0], device=self.device, dtype=torch.float32
        )
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=self.group)
        if not bool(differs):
            return
        self._param_group.reshard()
        self._written = values
        try:
            make_scales([self])
            qdata, scale = self._quantized(values)
        finally:
            self._written = None
        payload.take_own_memory()
        payload.qdata.copy_(qdata)
        payload.scale.copy_(scale)

    def _keep_shard(self) -> None:
        """Replace FSDP's `reset_sharded_param`, which would pad the shard in high precision."""
        param = self.fsdp_param
        new = getattr(param._module_info.module, param._module_info.param_name)
        if new is not param.sharded_param:
            param.sharded_param = new
        make_askable(self.shard, self)

    def _moved(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor that FSDP uses on the device if the shard stays on the CPU."""
        moved = self.shard.qdata.new_empty(0).to(*args, **kwargs)
        make_askable(moved, self)
        return moved

    def pre(self, shard: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends: (rows, K) uint8, padded.

        Raises:
            RuntimeError: ``requires_grad`` was set; a DTensor cannot announce that to its shard.
        """
        bytes_ = self._held().qdata.view(torch.uint8).to(self.device, non_blocking=True)
        rows = self.fsdp_param.padded_sharded_param_size[0]
        if bytes_.shape[0] != rows:
            bytes_ = F.pad(bytes_, (0, 0, 0, rows - bytes_.shape[0]))
        return (bytes_,), self._scale

    def _held(self) -> FrozenPayload:
        """Return this rank's rows in FP8.

        Raises:
            RuntimeError: ``requires_grad`` was set; a DTensor cannot announce that to its shard.
        """
        payload: FrozenPayload = self.shard.payload
        if self.fsdp_param.sharded_param.requires_grad:
            raise RuntimeError(
                f"'{payload.name}' is stored in FP8 only and sharded by FSDP2, and its gradient "
                "was requested (requires_grad=True); thaw the model before fully_shard, or convert "
                "it with FP8Config(frozen_weights='keep')"
            )
        return payload


class FrozenExpertGather(FrozenGather, ExpertGather):
    """The gather of one frozen, fused expert weight.

    Each rank sends whole experts with their scales, and the transposes for backward.
    """

    pre = ExpertGather.pre

    def _place_in_block(self, rows: int) -> int | None:
        return None

    def _quantized(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        payload = quantize_stacked(rows, self.spec)
        return payload.qdata.contiguous(), payload.scale.contiguous()

    def _payload(self, shard: Tensor, flip: bool) -> QuantizedTensor:
        held = self._held().quantized
        qdata, scale = (t.to(self.device, non_blocking=True) for t in (held.qdata, held.scale))
        payload = held._replace(qdata=qdata, scale=scale)
        return transposed_stacked(payload, self.spec) if flip else payload


def connect_frozen(groups: list[Any]) -> int:
    """Store the shards of frozen weights only in FP8; return the number of these weights.

    Args:
        groups: FSDP's groups of parameters that are gathered together, the same on all ranks.
    """
    gathered, held = [], 0
    for group in groups:
        for param in group.fsdp_params:
            module = param._module_info.module
            if not is_frozen(param):
                continue
            held += 1
            if not isinstance(local(param.sharded_param), Float8FrozenWeight):
                kind = FrozenExpertGather if isinstance(module, Float8Experts) else FrozenGather
                gathered.append(kind(param, group, module))
    if gathered:
        make_scales(gathered)
    for gather in gathered:
        gather.freeze()
    return held


def is_frozen(param: Any) -> bool:
    """Return whether FSDP's record is of a weight that should be stored only in FP8."""
    return can_be_frozen(param) and bool(param._module_info.module.fp8.frozen)


def can_be_frozen(param: Any) -> bool:
    """Return whether FSDP's record is of a weight that ranks can store only in FP8.

    It must be the weight of a single FP8 layer, sharded by rows, or a fused weight, sharded by
    experts.
    """
    info, shards = param._module_info, hasattr(param.mesh_info, "shard_process_group")
    if is_expert_weight(info.module, info.param_name):
        return shards and why_not_gathered(param) is None
    if not isinstance(info.module, Float8Layer) or info.param_name != "weight":
        return False
    return shards and param.fsdp_placement.dim == 0 and not info.shared_modules
