"""Checks that 8-bit states and residuals can follow the sharding of their parameter.

States can follow every sharding along rows (column-wise parallel, FSDP2). If a matrix is sharded
along its columns (row-wise parallel), groups of 32 start anew on each rank; the states equal those
of the whole matrix bit for bit if each rank has a multiple of 32 columns. One byte of a residual
cannot be shared by two ranks.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.optim.state import is_large


def check_shardings(optimizer: Optimizer, model: nn.Module | None) -> None:
    """Run `check_sharding` on all parameters that get 8-bit states or a residual.

    Args:
        optimizer: the optimizer, converted or not.
        model: the model that gives the parameters' names; None: the error numbers them.
    """
    named = {} if model is None else {p: f"'{n}'" for n, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, parameter in enumerate(parameters):
        if is_large(parameter) or parameter.dtype == torch.bfloat16:
            check_sharding(parameter, named.get(parameter, f"parameter {i}"))


def check_sharding(parameter: Tensor, name: str) -> None:
    """Raise ValueError unless 8-bit states can follow a DTensor's sharding.

    Args:
        parameter: the parameter.
        name: the parameter's name for the error.
    """
    if not isinstance(parameter, DTensor):
        return
    placements = enumerate(parameter.placements)
    for axis, placement in ((a, p) for a, p in placements if getattr(p, "dim", 0) != 0):
        ranks, last = parameter.device_mesh.size(axis), parameter.ndim - 1
        if parameter.ndim != 2 or placement.dim != last:
            raise ValueError(
                f"{name} is sharded as {parameter.placements}; 8-bit states and split weights can "
                "only be sharded along rows, or along the columns of a matrix. Keep the optimizer "
                "unchanged with FP8Config(opt_level='O1')"
            )
        if not is_large(parameter) and parameter.shape[last] % ranks:
            raise ValueError(
                f"{name} has {parameter.shape[last]} columns on {ranks} ranks; its residual of 16 "
                f"bits needs a multiple of {ranks}. Use FP8Config(opt_level='O1')"
            )
