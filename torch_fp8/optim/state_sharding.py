"""Which shardings of a parameter its 8-bit states and its residual can follow.

States can follow every sharding along rows (column-wise parallel, FSDP2). Along the columns of a
matrix (row-wise parallel) groups of 32 start anew on every rank; where each rank has a multiple of
32 columns, states are those of the whole matrix bit for bit. A byte of a residual may not belong to
two ranks.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.optim.state import SMALL_RESIDUAL_BITS, is_large


def check_shardings(optimizer: Optimizer, model: nn.Module | None, config: FP8Config) -> None:
    """Run `check_sharding` on all parameters that have 8-bit states or a residual.

    Args:
        optimizer: not necessarily converted.
        model: the model that names the parameters; None: they are numbered.
        config: the configuration with the residual bits.
    """
    named = {} if model is None else {p: f"'{n}'" for n, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, parameter in enumerate(parameters):
        large, bits = is_large(parameter), 0
        if parameter.dtype == torch.bfloat16:
            bits = (config.large_residual_bits or 0) if large else SMALL_RESIDUAL_BITS
        if large or bits:
            check_sharding(parameter, bits, named.get(parameter, f"parameter {i}"))


def check_sharding(parameter: Tensor, bits: int, name: str) -> None:
    """Raise ValueError unless the states of a DTensor can be sharded as it is.

    Args:
        parameter: a parameter that will have a residual of `bits`, or none with 0.
        bits: k of `torch_fp8.quantization.split_float`.
        name: the parameter's name, for the error.
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
        unit = {4: 2 * ranks, 16: ranks}.get(bits, 1)
        if parameter.shape[last] % unit:
            raise ValueError(
                f"{name} has {parameter.shape[last]} columns on {ranks} ranks; its residual of "
                f"{bits} bits needs a multiple of {unit}. Use residual_bits=8, or "
                "FP8Config(opt_level='O1')"
            )
