"""The FP8 all-gather of FSDP2: what a shard sends, and how the whole weight is assembled.

FSDP2 calls two methods of a sharded local tensor, one before the all-gather and one after. They can
be attributes of a plain tensor, set after ``fully_shard``, so parameters, state dicts, optimizers
and checkpoints still contain plain tensors.

A shard is cast with the scales of the whole weight, so the gathered bytes equal those of a cast of
the whole weight on one device. For this, one collective before each forward combines the amaxes of
all weights of a root over ranks, so a scale is never older than the weight. Backward gathers again
with the same scales. If a gather has no forward before it (a call of ``unshard()``, a method
registered as forward), the scales of its group are computed when it starts.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.distributed.fsdp.split_weights import renew_unsharded
from torch_fp8.distributed.fsdp.unsharded_weight import (
    Payload,
    UnshardedFloat8Weight,
    exponent_bytes,
)
from torch_fp8.distributed.links import Exchanges
from torch_fp8.nn.delayed_scaling import WEIGHT
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.quantize import QuantizedTensor, cast_saturating, quantize
from torch_fp8.quantization.payload_shape import BLOCK_SHAPE, IN_ROWS, scale_shape
from torch_fp8.quantization.scaling import scale_from_amax, tensor_amax
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.split_weight import stored

_ATTRIBUTES = ("fsdp_pre_all_gather", "fsdp_post_all_gather", "to", "__deepcopy__", "__getstate__")


class WeightGather:
    """The gather of one sharded weight.

    Args:
        fsdp_param: FSDP's record of the weight.
        param_group: FSDP's group of parameters that one collective gathers.
        module: the module that has the weight.
    Attributes:
        device: the device on which it is gathered.
        group: the process group of its shards.
        siblings: the gathers of all weights in its `param_group`, including this one.
        exchanges: the choice between gathers in 8 bits and in high precision.
        announced: whether a running forward has computed its scale.
        made: the event in the stream that computed it, or None on the CPU.
    """

    announced = _made_for_this_gather = False
    made: Any = None
    _scale: Tensor | None = None

    def __init__(self, fsdp_param: Any, param_group: Any, module: Float8Layer) -> None:
        self.fsdp_param, self.module = fsdp_param, module
        self._param_group = param_group
        self.device = param_group.device
        self.group = fsdp_param.mesh_info.shard_process_group
        self.spec = module.fp8.recipe.weight
        self.siblings: list[WeightGather] = [self]
        self.exchanges = Exchanges()

    @property
    def shard(self) -> Tensor:
        """This rank's rows without padding, as the GEMMs see them."""
        return stored(self._asked)

    @property
    def _asked(self) -> Tensor:
        """The local tensor whose methods FSDP calls."""
        return local(self.fsdp_param.sharded_param)

    @property
    def attached(self) -> bool:
        """Whether FSDP calls our methods for this shard."""
        return "fsdp_pre_all_gather" in vars(self._asked)

    @property
    def wanted(self) -> bool:
        """Whether the module multiplies in FP8 now; otherwise it gathers in high precision."""
        module = self.module
        return module.runs_fp8 and not module.fp8.recipe.bf16_forward and self.exchanges["gather"]

    def attach(self) -> None:
        """Have FSDP call our methods from the next all-gather on."""
        self._param_group.reshard()
        shard = self._asked
        make_askable(shard, self)
        if self.fsdp_param.offload_to_cpu:
            shard.to = self._moved
        # A copy or a pickle of the tensor must be plain.
        shard.__deepcopy__ = self._copied
        shard.__getstate__ = dict
        renew_unsharded(self.fsdp_param)

    def detach(self) -> None:
        """Undo `attach`."""
        self._param_group.reshard()
        for name in _ATTRIBUTES:
            vars(self._asked).pop(name, None)
        renew_unsharded(self.fsdp_param)

    def _moved(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the shard on the device; with CPU offload FSDP uses this copy's methods."""
        shard = self._asked
        moved = Tensor.to(shard, *args, **kwargs)
        if moved is not shard:
            make_askable(moved, self)
        return moved

    def _copied(self, memo: dict[int, Any]) -> Tensor:
        shard = self._asked
        copied = shard.detach().clone().requires_grad_(shard.requires_grad)
        return memo.setdefault(id(shard), copied)

    @property
    def amax_shape(self) -> tuple[int, ...]:
        """The shape of the amaxes that ranks combine; (0,) if scales travel with the bytes."""
        granularity = self.spec.granularity
        if granularity == "tensorwise" or granularity in IN_ROWS:
            return (1,) if granularity == "tensorwise" else (0,)
        rows, cols = self.fsdp_param._orig_size
        return scale_shape(rows, cols, granularity)

    def write_amax(self, target: Tensor) -> None:
        """Write the amaxes of this rank's rows into `target`, zeros of shape `amax_shape`."""
        shard = self.shard
        if not shard.numel() or not target.numel():
            return
        if self.spec.granularity == "tensorwise":
            target[0] = tensor_amax(shard)
            return
        first = self._first_row()
        if self.spec.granularity == "rowwise":
            target[first : first + shard.shape[0]] = shard.abs().amax(1, keepdim=True).float()
            return
        cols = target.shape[1] * 128
        top = first % 128
        bottom = -(top + shard.shape[0]) % 128
        padded = F.pad(shard.abs(), (0, cols - shard.shape[1], top, bottom))
        # (N / 128, 128, K / 128, 128) -> (N / 128, K / 128)
        amax = padded.view(-1, 128, cols // 128, 128).amax((1, 3)).float()
        target[first // 128 : first // 128 + amax.shape[0]] = amax

    def set_amax(self, amax: Tensor, scale: Tensor) -> None:
        """Set the whole weight's amaxes (`amax_shape`) and the scales computed from them."""
        self._scale = scale.view(()) if self.spec.granularity == "tensorwise" else scale
        if self.spec.delayed:
            scaling: Any = self.module.fp8.scaling
            source = scaling.sources(self.module)[WEIGHT]
            source.record(amax)
            self._scale = self._scale if source.scale is None else source.scale

    def _first_row(self) -> int:
        return dist.get_rank(self.group) * self.fsdp_param.padded_sharded_param_size[0]

    def _own_rows(self) -> tuple[Tensor, int]:
        return self.shard, self._first_row()

    def pre(self, shard: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends: (rows, K) uint8, padded, and its own scales if any."""
        is_ready = in_backward() and self._scale is not None
        if not (self.announced or self._made_for_this_gather or is_ready):
            make_scales(self.siblings)
            for sibling in self.siblings:
                sibling._made_for_this_gather = True
        self._made_for_this_gather = False
        if self.made is not None:
            torch.cuda.current_stream(self.device).wait_event(self.made)
        rows, shard = self.fsdp_param.padded_sharded_param_size[0], stored(shard)
        if shard.shape[0] != rows:
            shard = F.pad(shard, (0, 0, 0, rows - shard.shape[0]))  # (padded rows, K)
        quantized = self._cast(shard)
        inputs = [quantized.qdata.view(torch.uint8)]
        if self.spec.granularity in IN_ROWS:
            inputs.append(exponent_bytes(quantized.scale))
        return tuple(inputs), self._scale

    def _cast(self, shard: Tensor) -> QuantizedTensor:
        scale: Any = self._scale
        if self.spec.granularity == "tensorwise":
            return quantize(shard, self.spec, scale)
        if self.spec.granularity != "block_128x128" or shard.shape[0] % 128 == 0:
            return quantize(shard, self.spec)  # this rank has all elements that share a scale
        last_row = self.fsdp_param._orig_size[0] - 1
        rows = torch.arange(shard.shape[0], device=shard.device) + self._first_row()
        scale = scale[rows.clamp(max=last_row) // 128]  # (rows of the shard, K / 128)
        scale = scale.repeat_interleave(BLOCK_SHAPE["block_128x128"][1], 1)[:, : shard.shape[1]]
        qdata = cast_saturating(shard.float(), scale, self.spec.format)
        return QuantizedTensor(qdata, scale, "block_128x128")

    def post(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, out: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, or fill `out` again; FSDP frees the outputs it is made of."""
        scale = metadata
        rows, cols = self.fsdp_param._orig_size
        # (ranks * padded rows, K) -> (N, K) without the padding
        qdata = outputs[0].view(-1)[: rows * cols].view(rows, cols).view(self.spec.format.dtype)
        if len(outputs) == 2:
            scale = outputs[1].view(rows, -1)  # (N, scales of a row)
        elif scale.is_cuda:  # the scale may belong to the stream in which FSDP casts
            scale.record_stream(torch.cuda.current_stream(scale.device))
        if out is None:
            payload = Payload(qdata, scale, self.spec, self._own_rows)
            return UnshardedFloat8Weight(payload, dtype), ()
        weight: Any = local(out)
        weight.payload.qdata, weight.payload.scale = qdata, scale
        return None


@torch.no_grad()
@torch.inference_mode(False)  # training may use scales that an evaluation has made
def make_scales(gathers: Iterable[WeightGather]) -> None:
    """Compute the scales of some weights, with one collective for each of their process groups.

    All ranks must pass the same weights in the same order. An Inf or NaN on one rank makes the
    scale, and so the gathered weight, non-finite on all ranks.
    """
    groups: dict[Any, list[WeightGather]] = {}
    for gather in gathers:
        groups.setdefault(gather.group, []).append(gather)
    for group, members in groups.items():
        _make_scales(group, members)


def _make_scales(group: Any, gathers: list[WeightGather]) -> None:
    shapes = [gather.amax_shape for gather in gathers]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    amax = torch.zeros(sum(sizes), dtype=torch.float32, device=gathers[0].shard.device)
    if all(gather.spec.granularity == "tensorwise" for gather in gathers):
        _write_amaxes([gather.shard for gather in gathers], amax)
    else:
        for gather, part, shape in zip(gathers, amax.split(sizes), shapes, strict=True):
            gather.write_amax(part.view(shape))
    if not amax.is_meta:  # as it is in a model whose values are loaded later
        amax = amax.to(gathers[0].device)
        if amax.numel() and dist.get_world_size(group) > 1:
            # A backend's maximum may drop a NaN, but keeps an Inf.
            amax = torch.where(amax.isfinite(), amax, torch.inf)
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    amaxes, specs = amax.split(sizes), [gather.spec for gather in gathers]
    if len(set(specs)) == 1:
        scales = scale_from_amax(amax, specs[0].format, specs[0].power_of_two).split(sizes)
    else:  # layers with their own options
        scales = tuple(
            scale_from_amax(part, spec.format, spec.power_of_two)
            for part, spec in zip(amaxes, specs, strict=True)
        )
    for gather, part, scale, shape in zip(gathers, amaxes, scales, shapes, strict=True):
        gather.set_amax(part.view(shape), scale.view(shape))
    event = torch.cuda.current_stream(amax.device).record_event() if amax.is_cuda else None
    for gather in gathers:
        gather.made = event


def _write_amaxes(shards: list[Tensor], target: Tensor) -> None:
    """Write each shard's amax, () float32, into `target`; on CUDA in a few launches for all."""
    places = [i for i, shard in enumerate(shards) if shard.numel()]
    if not places:
        return
    present = [shards[i].detach() for i in places]
    if present[0].is_cuda:
        amaxes = torch._foreach_norm(present, torch.inf, dtype=torch.float32)
    else:
        amaxes = tuple(tensor_amax(shard) for shard in present)
    if len(places) == len(shards):
        target.copy_(torch.stack(amaxes))
    else:
        target[torch.tensor(places, device=target.device, dtype=torch.int64)] = torch.stack(amaxes)


def make_askable(tensor: Tensor, gather: WeightGather) -> None:
    """Set the two methods that FSDP calls on a tensor; they don't keep it alive."""
    shard = weakref.ref(tensor)

    def fsdp_pre_all_gather(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return gather.pre(shard())

    def fsdp_post_all_gather(
        outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        return gather.post(outputs, metadata, param_dtype, out)

    tensor.fsdp_pre_all_gather = fsdp_pre_all_gather
    tensor.fsdp_post_all_gather = fsdp_post_all_gather


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1
