"""Split master weights of a model that FSDP2 has sharded already: split and joined shard by shard.

`torch_fp8.fsdp` splits weights before they are sharded. Where the host makes the optimizers after
it (Lightning), the shards themselves become BF16 and residual, and float32 again: the Parameters
stay the same objects, and no rank ever has more than its part.

The trainable parameters of an FSDP2 group must have one dtype. So small ones become BF16, too, with
16 bits of residual, which makes them float32 numbers still.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.gradient_hooks import detach_hooks
from torch_fp8.optimizer import Float8Optimizer
from torch_fp8.optimizer_conversion import OptimizerReport, convert_optimizer, join_parameter
from torch_fp8.optimizer_state import (
    MIN_NUMEL,
    like_parameter,
    local,
    residual_shape,
    split_weight,
    with_data,
    zero_residual,
)
from torch_fp8.optimizer_step import SMALL_RESIDUAL_BITS
from torch_fp8.state_sharding import check_sharding


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
        ValueError: a parameter sharded as states cannot be (`torch_fp8.state_sharding`); see
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
