"""Split the float32 weights of a model that FSDP2 has sharded, and join them again.

``convert_to_float8``, then ``fully_shard`` of the float32 weights, the optimizer, then this, then
``connect_fsdp`` of `torch_fp8.distributed`. `split_sharded` makes BF16 and residual of the shards
themselves, and `join_sharded` float32 again: the Parameters stay the same objects, and no rank ever
has more than its part. Shard by shard: beside the shards there is one more at a time.

The trainable parameters of an FSDP2 group must have one dtype. So small ones become BF16, too, with
16 bits of residual, which makes them float32 numbers still.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.optim.convert import OptimizerReport, convert_optimizer, join_parameter
from torch_fp8.optim.grad_hooks import detach_hooks
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.optim.state import SMALL_RESIDUAL_BITS, residual_shape, zero_residual
from torch_fp8.optim.state_sharding import check_sharding
from torch_fp8.quantization.block_scaled import MIN_NUMEL
from torch_fp8.tensor.dtensor import like_parameter, local, with_data
from torch_fp8.tensor.halves import split_matrix


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
    if config.large_residual_bits is None:
        return reports
    if not all(report.converted for report in reports) or trained.values() - owners.keys():
        return reports
    bits: dict[Tensor, int] = {}
    for name, parameter in trained.items():
        if isinstance(parameter, DTensor) and parameter.dtype == torch.float32:
            bits[parameter] = _bits(parameter, config)
            check_sharding(parameter, bits[parameter], f"'{name}'")

    if not bits:
        return reports

    def split(parameter: Tensor) -> DTensor:
        owner, k = owners[parameter], bits[parameter]
        high, residual = split_matrix(local(parameter.detach()), k)
        owner._fp8_dtypes[parameter] = torch.float32
        if residual is not None:
            shape = residual_shape(parameter.shape, k)
            owner.set_residual(parameter, like_parameter(parameter, residual, shape))
        else:  # no bits, or nothing on this rank
            owner.set_residual(parameter, zero_residual(parameter, k) if k else None)
        return _sharded(parameter, high)

    _detach_hooks(optimizers)
    replace_shards(model, bits, split)
    return [convert_optimizer(o, config, model=model) for o in optimizers]


@torch.no_grad()
def join_sharded(model: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Make the shards float32 again that `split_sharded` has split; returns their number."""
    ours = [o for o in optimizers if isinstance(o, Float8Optimizer)]
    _detach_hooks(ours)
    owners = {p: o for o in ours for p in _split_parameters(o)}

    def join(parameter: Tensor) -> DTensor:
        owner = owners[parameter]
        joined = _sharded(parameter, join_parameter(owner, parameter))
        owner.set_residual(parameter, None)
        owner._fp8_dtypes.pop(parameter)
        return joined

    replace_shards(model, owners, join)
    return len(owners)


def reshard(model: nn.Module) -> None:
    """Free what a root keeps gathered after its forward: the parameters are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def replace_shards(
    model: nn.Module, parameters: Iterable[Tensor], make: Callable[[Tensor], DTensor]
) -> None:
    """Put other shards, perhaps of another dtype, into sharded Parameters, which stay the same.

    As ``model.to(dtype)`` does it, for some of the parameters, and one by one: FSDP2 lets go of an
    old shard before the next one is made. The gradients of these parameters are dropped.

    Args:
        model: that FSDP2 has sharded.
        parameters: of it.
        make: returns what a parameter becomes, of its global shape and placements.
    """
    reshard(model)
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in param_groups(m)]
    known = {p.sharded_param: p for group in groups for p in group.fsdp_params}
    for parameter in parameters:
        parameter.grad = None
        made = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)
        del made
        if parameter in known:
            known[parameter].reset_sharded_param()
    for group in groups:
        group._init_mp_dtypes()  # which casts its gather makes; read at the first forward, and kept


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


def _split_parameters(optimizer: Float8Optimizer) -> list[Tensor]:
    return [
        parameter
        for _, _, parameter in optimizer.indexed_parameters()
        if isinstance(parameter, DTensor)
        and parameter.dtype == torch.bfloat16
        and optimizer.original_dtype(parameter) == torch.float32
    ]


def _detach_hooks(optimizers: Iterable[Optimizer]) -> None:
    """Take gradient hooks away; conversion attaches them to what is there then."""
    for optimizer in optimizers:
        detach_hooks(optimizer)
        if isinstance(optimizer, Float8Optimizer):
            optimizer.fp8_layers = ()
