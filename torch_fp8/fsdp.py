"""Split master weights under FSDP2: BF16 before ``fully_shard``, residuals sharded after it.

::

    convert_to_float8(model, config)
    splits = split_for_sharding(model, [optimizer], config)
    fully_shard(model)  # and the optimizer gets the new parameters
    reports = shard_residuals(model, [optimizer], splits, config)
    connect_fsdp(model, config)  # of torch_fp8.fsdp_communication

The trainable parameters of an FSDP2 group must have one dtype. So small ones become BF16, too, with
16 bits of residual, which makes them float32 numbers still.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.module_class import unwrapped_name
from torch_fp8.optimizer import Float8Optimizer
from torch_fp8.optimizer_conversion import OptimizerReport, convert_optimizer, restore_weights
from torch_fp8.optimizer_state import (
    MIN_NUMEL,
    like_parameter,
    local,
    matrix_shape,
    residual_shape,
    split_weight,
)
from torch_fp8.optimizer_step import SMALL_RESIDUAL_BITS
from torch_fp8.output_dtype import restore_output_dtype


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
