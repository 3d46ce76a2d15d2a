"""Split the float32 weights of a model that FSDP2 has sharded, and join them again.

Call ``convert_to_float8``, ``fully_shard`` with float32 weights, create the optimizer, call
`split_sharded` and then ``connect_fsdp`` of `torch_fp8.distributed`. `split_sharded` stores each
large shard in two halves (`torch_fp8.tensor.split_shard`), and `join_sharded` joins the halves
again. The Parameters remain the same float32 DTensors, and each rank only ever has its own part.
Shards are processed one by one, so memory holds at most one additional shard.
"""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.nn.class_swap import param_groups
from torch_fp8.optim.convert import OptimizerReport, convert_optimizer
from torch_fp8.optim.converted import ConvertedOptimizer
from torch_fp8.optim.gradient_slot import detach_slots
from torch_fp8.optim.state import is_large
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.split_shard import SplitShard


@torch.no_grad()
def split_sharded(
    model: nn.Module, optimizers: Iterable[Optimizer], config: FP8Config
) -> list[OptimizerReport]:
    """Convert the optimizers of a sharded model, and split the large float32 weights they train.

    A repeated call changes nothing.

    Args:
        model: the model sharded by ``fully_shard``, not in the middle of a forward or backward.
        optimizers: all optimizers that train it; each has the sharded parameters.
        config: the configuration; level O1 changes nothing.
    Returns:
        A report for each optimizer.
    Raises:
        ValueError: the states cannot follow a parameter's sharding
            (`torch_fp8.optim.arguments`); see also `torch_fp8.convert_optimizer`.
    """
    check_arguments(split_sharded, locals())
    optimizers = list(optimizers)
    reports = [convert_optimizer(o, config, model=model) for o in optimizers]
    if not config.keeps_residuals:
        return reports
    ours = [o for o in optimizers if isinstance(o, ConvertedOptimizer)]
    trained = {p for o in ours for _, _, p in o.indexed_parameters() if p.requires_grad}
    reshard(model)
    for group in fsdp_groups(model):
        _sum_in_float32(group)
    large = [p for p in model.parameters() if p in trained and is_large(p)]
    sharded = [p for p in large if p.dtype == torch.float32 and isinstance(p, DTensor)]
    whole = [p for p in sharded if type(p._local_tensor) is Tensor]
    if not whole:
        return reports
    gathered = {param.sharded_param: param for param in fsdp_params(model)}
    for parameter in whole:
        _split(parameter, gathered.get(parameter))
    return [convert_optimizer(o, config, model=model) for o in optimizers]


def _split(parameter: DTensor, param: Any) -> None:
    """Split the shard of a parameter and free its float32 memory.

    Args:
        parameter: the float32 parameter.
        param: FSDP2's record of it, or None if tensor parallelism has sharded it.
    """
    shard = parameter._local_tensor
    size = shard.shape if param is None else param.padded_sharded_param_size
    pin = param is not None and param.pin_memory and not shard.is_meta
    padded = torch.zeros(size, dtype=torch.bfloat16, device=shard.device, pin_memory=pin)
    parameter._local_tensor = SplitShard.of(shard, padded)
    if param is not None:
        param._sharded_param_data = padded.view(-1)
        renew_unsharded(param)


def _sum_in_float32(group: Any) -> None:
    """Have FSDP2 sum the gradients of a group that it does not reduce yet in float32.

    FSDP2 sums them in the dtype in which it reduces. In BF16 a sum of 512 comes out a third short.
    """
    policy = group.mp_policy
    if policy.param_dtype is not None and policy.reduce_dtype in (None, policy.param_dtype):
        for param in group.fsdp_params:
            param.accumulate_unsharded_grad_if_needed = partial(_accumulate, group, param)


def _accumulate(group: Any, param: Any) -> None:
    """Add a micro-batch's gradient after its backward; round the last sum to the gradients' dtype.

    FSDP2 converts gradients to `reduce_dtype` later, and all that it reduces must have one dtype.
    """
    type(param).accumulate_unsharded_grad_if_needed(param)
    if not group.reduce_grads:
        param.reduce_dtype = torch.float32
    elif param.unsharded_accumulated_grad is not None:
        dtype = group.mp_policy.param_dtype
        param.unsharded_accumulated_grad = param.unsharded_accumulated_grad.to(dtype)


@torch.no_grad()
def join_sharded(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> int:
    """Turn the shards that `split_sharded` has split into plain float32 tensors again.

    Args:
        model: the model, not in the middle of a forward or backward.
        optimizers: the optimizers that train it; their gradient hooks are removed.
    Returns:
        The number of joined shards.
    """
    check_arguments(join_sharded, locals())
    reshard(model)
    gathered = {param.sharded_param: param for param in fsdp_params(model)}
    split: list[Any] = [p for p in model.parameters() if isinstance(local(p), SplitShard)]
    for parameter in split:
        grad, parameter.grad = parameter.grad, None
        parameter._local_tensor = plain(parameter._local_tensor)
        if parameter in gathered:
            gathered[parameter].reset_sharded_param()
            renew_unsharded(gathered[parameter])
        if isinstance(grad, DTensor):
            grad._local_tensor = plain(grad._local_tensor)
            parameter.grad = grad
    for param in fsdp_params(model):
        if vars(param).pop("accumulate_unsharded_grad_if_needed", None) is not None:
            param.reduce_dtype = None
    for optimizer in optimizers:
        detach_slots(optimizer)
        if isinstance(optimizer, ConvertedOptimizer):
            optimizer.fp8_layers = ()
    return len(split)


def renew_unsharded(param: Any) -> None:
    """Have FSDP2 create the unsharded parameter again if it has one of another kind."""
    param._init_extensions()
    unsharded = param.__dict__.pop("_unsharded_param", None)
    param.all_gather_outputs = []
    if unsharded is not None and unsharded.grad is not None:  # accumulated without a reduction
        if param.unsharded_accumulated_grad is None:
            param.unsharded_accumulated_grad = unsharded.grad
        else:
            param.unsharded_accumulated_grad += unsharded.grad


def reshard(model: nn.Module) -> None:
    """Free the weights that a root keeps gathered after its forward."""
    for module in sharded_modules(model):
        module.reshard()


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model to which ``fully_shard`` was applied."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fsdp_groups(model: nn.Module) -> list[Any]:
    """Return the parameter groups of all FSDP modules, each once."""
    groups = map(param_groups, sharded_modules(model))
    return list(dict.fromkeys(itertools.chain.from_iterable(groups)))


def fsdp_params(model: nn.Module) -> list[Any]:
    """Return FSDP2's record of each parameter that it has sharded."""
    return [param for group in fsdp_groups(model) for param in group.fsdp_params]
