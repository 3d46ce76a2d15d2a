"""Weights that nobody trains, sharded by FSDP2: each rank holds its rows in FP8 alone.

A shard takes a byte an element, and is gathered as it is. The scales of the whole weight, one for
128 x 128 elements, are on every rank: they are found once, in one collective, when the model is
connected, and blocks whose rows lie on two ranks have one scale on both.
"""

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.distributed.fsdp.all_gather import WeightGather, make_askable, make_scales
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.payload_shape import BLOCK_SHAPE
from torch_fp8.tensor.frozen_payload import FrozenPayload
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight


class FrozenGather(WeightGather):
    """How the bytes of one frozen weight's shards are gathered."""

    wanted = True

    def freeze(self) -> None:
        """Hold this rank's rows in FP8 alone from now on; `make_scales` has made the scales."""
        self._param_group.reshard()
        layer, shard = self.module, self.shard
        rows, dtype = shard.shape[0], shard.dtype
        quantized = self._cast(shard.detach())
        first = self._first_row()
        scale = self._scale
        assert scale is not None
        of_rows = scale
        if self.spec.granularity in BLOCK_SHAPE:
            of_rows = scale[first // 128 : -(-(first + rows) // 128)].contiguous()
        payload = FrozenPayload(
            quantized.qdata[:rows].to(shard.device).contiguous(),
            of_rows.to(shard.device),
            self.spec,
            f"{layer.fp8_name}.weight".lstrip("."),
            dtype,
            weakref.ref(layer),
            first % 128 if rows else 0,
        )
        frozen = Float8FrozenWeight(payload)
        param = self.fsdp_param
        param.sharded_param._local_tensor = frozen
        param.sharded_param.requires_grad_(False)
        param._sharded_param_data = frozen.qdata.new_empty(0, dtype=dtype)
        param.reset_sharded_param = self._keep_shard
        make_askable(frozen, self)
        if param.offload_to_cpu:
            frozen.to = self._moved
        self._start_afresh()

    def _keep_shard(self) -> None:
        """Stand for FSDP's own `reset_sharded_param`, which would pad the shard in high
        precision.
        """
        param = self.fsdp_param
        new = getattr(param._module_info.module, param._module_info.param_name)
        if new is not param.sharded_param:
            param.sharded_param = new
        make_askable(self.shard, self)

    def _moved(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what answers FSDP on the device, where the shard itself stays on the CPU."""
        moved = self.shard.qdata.new_empty(0).to(*args, **kwargs)
        make_askable(moved, self)
        return moved

    def pre(self, shard: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends: (rows, K) uint8, padded."""
        del shard
        held = self.shard
        assert isinstance(held, Float8FrozenWeight)
        bytes_ = held.qdata.view(torch.uint8).to(self.device, non_blocking=True)
        rows = self.fsdp_param.padded_sharded_param_size[0]
        if bytes_.shape[0] != rows:
            bytes_ = F.pad(bytes_, (0, 0, 0, rows - bytes_.shape[0]))
        return (bytes_,), (self._scale, None)


def connect_frozen(groups: list[Any]) -> int:
    """Hold the shards of frozen weights in FP8 alone; return how many weights are held so.

    Args:
        groups: FSDP's groups of parameters that are gathered together, the same on all ranks.
    """
    made, held = [], 0
    for group in groups:
        for param in group.fsdp_params:
            module = param._module_info.module
            if not is_frozen(param):
                continue
            held += 1
            if not isinstance(param._sharded_local_tensor, Float8FrozenWeight):
                made.append(FrozenGather(param, group, module))
    if made:
        make_scales(made)
    for gather in made:
        gather.freeze()
    return held


def is_frozen(param: Any) -> bool:
    """Return whether FSDP's record is of a weight that is to be held in FP8 alone."""
    module = param._module_info.module
    return can_be_frozen(param) and module.fp8_thawed_recipe is not None


def can_be_frozen(param: Any) -> bool:
    """Return whether FSDP's record is of the weight of one FP8 layer, sharded by rows."""
    info = param._module_info
    if not isinstance(info.module, Float8Layer) or info.param_name != "weight":
        return False
    by_rows = hasattr(param.mesh_info, "shard_process_group") and param.fsdp_placement.dim == 0
    return by_rows and not info.shared_modules
