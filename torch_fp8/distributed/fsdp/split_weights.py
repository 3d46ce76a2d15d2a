"""Split master weights under FSDP2, before ``fully_shard`` or after it.

Before, where the loop has its optimizers by then (Accelerate)::

    convert_to_float8(model, config)
    splits = split_for_sharding(model, [optimizer], config)
    fully_shard(model)  # and the optimizer gets the new parameters
    reports = shard_residuals(model, [optimizer], splits, config)
    connect_fsdp(model, config)  # of torch_fp8.distributed

Weights become BF16, and their residuals are sharded once they are. After, where the host makes the
optimizers later (Lightning), `split_sharded` makes BF16 and residual of the shards themselves, and
`join_sharded` float32 again: the Parameters stay the same objects, and no rank ever has more than
its part.

The trainable parameters of an FSDP2 group must have one dtype. So small ones become BF16, too, with
16 bits of residual, which makes them float32 numbers still.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.nn.class_swap import unwrapped_name
from torch_fp8.optim.convert import (
    OptimizerReport,
    convert_optimizer,
    join_parameter,
    restore_weights,
)
from torch_fp8.optim.embedding_dtype import restore_output_dtype
from torch_fp8.optim.grad_hooks import detach_hooks
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.optim.state import SMALL_RESIDUAL_BITS, residual_shape, split_weight, zero_residual
from torch_fp8.optim.state_sharding import check_sharding
from torch_fp8.quantization.block_scaled import MIN_NUMEL, matrix_shape
from torch_fp8.tensor.dtensor import like_parameter, local, with_data


class Split(NamedTuple):
    """What is left of a parameter that became BF16: its dtype, the residual of all of it, its bits.

    The residual is None where there is nothing below BF16.
    """

    dtype: torch.dtype
    residual: Tensor | None
    bits: int


@torch.no_grad()
def split_for_sharding(
    model: nn.Module, optimizers: Iterable[Optimizer], config: FP8Config
) -> dict[str, Split]:
    """Make every trainable parameter BF16, in place, and convert the optimizers.

    Args:
        model: not sharded yet.
        optimizers: those that train it.
        config: of level O2 or O3.
    Returns:
        What `shard_residuals` needs, by qualified name. Empty where nothing was cast, because an
        optimizer is left alone, or a trainable parameter is in none of them.
    Raises:
        ValueError: see `torch_fp8.convert_optimizer`.
    """
    optimizers = list(optimizers)
    reports = [convert_optimizer(o, config, model=model) for o in optimizers]
    owners = _owners(optimizers)
    trained = {
        name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()
    }
    restore_output_dtype(model, everywhere=True)
    complete = all(r.converted for r in reports) and all(p in owners for p in trained.values())
    if not complete:
        for optimizer in optimizers:
            restore_weights(optimizer)
        return {}
    return {unwrapped_name(name): _split(p, owners[p]) for name, p in trained.items()}


@torch.no_grad()
def shard_residuals(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    splits: dict[str, Split],
    config: FP8Config,
    *,
    from_rank0: bool = False,
) -> list[OptimizerReport]:
    """Convert the optimizers of a sharded model, and give each rank its part of the residuals.

    Args:
        model: sharded along the first dimension; wrappers of checkpointing and compilation may have
            come between.
        optimizers: the same ones, which hold the sharded parameters now.
        splits: of `split_for_sharding`, equal on all ranks but for the numbers.
        config: as before.
        from_rank0: whether the weights were rank 0's on all ranks (as with loading that spares
            memory); else each rank's part of its own.
    Raises:
        ValueError: a parameter sharded along another dimension.
    """
    optimizers = list(optimizers)
    reports = [convert_optimizer(o, config, model=model) for o in optimizers]
    owners = _owners(optimizers)
    parameters = {unwrapped_name(name): p for name, p in model.named_parameters()}
    for name, split in splits.items():
        parameter = parameters[name]
        owner = owners[parameter]
        owner._fp8_dtypes[parameter] = split.dtype
        if split.residual is None:
            continue
        whole = split.residual
        if from_rank0:
            whole = _from_rank0(whole, local(parameter).device)
        shard = _shard(parameter, whole, name).to(local(parameter).device)
        shape = residual_shape(parameter.shape, split.bits)
        owner.set_residual(parameter, like_parameter(parameter, shard, shape))
    return reports


def _split(parameter: Tensor, owner: Float8Optimizer) -> Split:
    dtype = owner._fp8_dtypes.pop(parameter, parameter.dtype)
    residual = owner.residual_of(parameter)
    owner.set_residual(parameter, None)
    large = parameter.ndim >= 2 and parameter.numel() >= MIN_NUMEL
    bits = owner.fp8_config.residual_bits if large else SMALL_RESIDUAL_BITS
    if parameter.dtype != torch.bfloat16:
        high, residual = split_weight(parameter.detach().float(), bits)
        parameter.grad = None
        parameter.data = high
    return Split(dtype, residual, bits)


def _shard(parameter: Tensor, residual: Tensor, name: str) -> Tensor:
    """This rank's part of the residual of all of a parameter."""
    if not isinstance(parameter, DTensor):  # ignored by fully_shard
        return residual
    if any(p.is_shard() and not p.is_shard(0) for p in parameter.placements):
        raise ValueError(
            f"{name!r} is sharded as {parameter.placements}; split weights are sharded along their "
            "first dimension only. Keep this model in float32, sharded before prepare, or use "
            "opt_level='O1'"
        )
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    shard = local(parameter)
    per_row = residual.numel() // parameter.shape[0]
    part = residual.reshape(parameter.shape[0], per_row)
    part = part[offset[0] : offset[0] + shard.shape[0]] if shard.numel() else part[:0]
    rows = matrix_shape(shard.shape)[0] if shard.ndim > 1 else 1
    cols = residual.shape[1] if shard.ndim > 1 else shard.numel()
    return part.reshape(rows, cols).clone()


def _from_rank0(residual: Tensor, device: torch.device) -> Tensor:
    # As bytes: neither gloo nor NCCL has int16.
    residual = (
        torch.empty_like(residual, device=device) if residual.is_meta else residual.to(device)
    )
    dist.broadcast(residual.view(torch.uint8), src=0)
    return residual


def _owners(optimizers: list[Optimizer]) -> dict[Tensor, Float8Optimizer]:
    return {
        p: optimizer
        for optimizer in optimizers
        if isinstance(optimizer, Float8Optimizer)
        for _, _, p in optimizer.indexed_parameters()
    }


@torch.no_grad()
def split_sharded(
    model: nn.Module, optimizers: Iterable[Optimizer], config: FP8Config
) -> list[OptimizerReport]:
    """Convert the optimizers of a sharded model, its float32 weights become BF16 and residual.

    All of them or none: they stay float32 where an optimizer is left alone, or a trainable
    parameter is in none of them. Again is harmless.

    Args:
        model: not in the middle of a forward or backward.
        optimizers: all that train it; each holds the sharded parameters.
        config: of any level; nothing is done at O1.
    Raises:
        ValueError: a parameter sharded as states cannot be (`torch_fp8.optim.state_sharding`); see
            `torch_fp8.convert_optimizer`.
    """
    optimizers = list(optimizers)
    reports = [convert_optimizer(o, config, model=model) for o in optimizers]
    owners = {
        p: optimizer
        for optimizer in optimizers
        if isinstance(optimizer, Float8Optimizer)
        for _, _, p in optimizer.indexed_parameters()
    }
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not all(report.converted for report in reports) or trained.values() - owners.keys():
        return reports
    halves: dict[Tensor, DTensor] = {}
    residuals: dict[Tensor, Tensor] = {}
    for name, parameter in trained.items():
        if isinstance(parameter, DTensor) and parameter.dtype == torch.float32:
            bits = _bits(parameter, config)
            check_sharding(parameter, bits, f"'{name}'")
            high, residual = split_weight(local(parameter.detach()), bits)
            halves[parameter] = _sharded(parameter, high)
            residuals[parameter] = (
                zero_residual(parameter, bits)
                if residual is None
                else like_parameter(parameter, residual, residual_shape(parameter.shape, bits))
            )
    if not halves:
        return reports
    _detach_hooks(optimizers)
    replace_shards(model, halves)
    for parameter, residual in residuals.items():
        owner = owners[parameter]
        owner._fp8_dtypes[parameter] = torch.float32
        owner.set_residual(parameter, residual if _bits(parameter, config) else None)
    return [convert_optimizer(o, config, model=model) for o in optimizers]


@torch.no_grad()
def join_sharded(model: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Make the shards float32 again that `split_sharded` has split; returns their number."""
    joined: dict[Tensor, DTensor] = {}
    ours = [o for o in optimizers if isinstance(o, Float8Optimizer)]
    _detach_hooks(ours)
    for optimizer in ours:
        for _, _, parameter in optimizer.indexed_parameters():
            split = isinstance(parameter, DTensor) and parameter.dtype == torch.bfloat16
            if split and optimizer.original_dtype(parameter) == torch.float32:
                joined[parameter] = _sharded(parameter, join_parameter(optimizer, parameter))
                optimizer.set_residual(parameter, None)
                optimizer._fp8_dtypes.pop(parameter)
    replace_shards(model, joined)
    return len(joined)


def reshard(model: nn.Module) -> None:
    """Free what a root keeps gathered after its forward: the parameters are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_split(optimizer: Optimizer) -> bool:
    """Whether `split_sharded` has split weights of an optimizer."""
    return isinstance(optimizer, Float8Optimizer) and any(
        isinstance(parameter, DTensor)
        and parameter.dtype == torch.bfloat16
        and optimizer.original_dtype(parameter) == torch.float32
        for _, _, parameter in optimizer.indexed_parameters()
    )


def replace_shards(model: nn.Module, shards: Mapping[Tensor, DTensor]) -> None:
    """Put other shards, perhaps of another dtype, into sharded Parameters, which stay the same.

    As ``model.to(dtype)`` does it, for some of the parameters alone. Their gradients are dropped.

    Args:
        model: that FSDP2 has sharded.
        shards: by Parameter; of its global shape and placements.
    """
    if not shards:
        return
    for parameter in shards:
        parameter.grad = None
    model._apply(lambda tensor: shards.get(tensor, tensor))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                # Which casts its gather makes; read at the first forward, and kept.
                group._init_mp_dtypes()


def param_groups(module: FSDPModule) -> list:
    """FSDP2's groups of parameters that are gathered together; one before torch 2.13."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (groups if groups is not None else [state._fsdp_param_group]) if g]


def _bits(parameter: Tensor, config: FP8Config) -> int:
    large = parameter.ndim >= 2 and parameter.numel() >= MIN_NUMEL
    return config.residual_bits if large else SMALL_RESIDUAL_BITS


def _sharded(parameter: Tensor, shard: Tensor) -> DTensor:
    tensor = with_data(parameter, shard)
    assert isinstance(tensor, DTensor)
    return tensor


def _detach_hooks(optimizers: Iterable[Optimizer]) -> None:
    """Take gradient hooks away; conversion attaches them to what is there then."""
    for optimizer in optimizers:
        detach_hooks(optimizer)
        if isinstance(optimizer, Float8Optimizer):
            optimizer.fp8_gradients = frozenset()
