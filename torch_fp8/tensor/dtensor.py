"""DTensors and what they hold: the local part of a tensor, and tensors made like another."""

import math

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def like_parameter(parameter: Tensor, data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`data`, of this rank's shard, as a DTensor of global `shape` where the parameter is one."""
    if not isinstance(parameter, DTensor):
        return data
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        data,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def with_data(tensor: Tensor, data: Tensor) -> Tensor:
    """`data`, of this rank's shard, sharded as `tensor`, a parameter or a gradient, is."""
    if not isinstance(tensor, DTensor):
        return data
    return DTensor.from_local(
        data,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def waited(x: Tensor) -> Tensor:
    """A tensor itself, where a collective of torch's may still be filling it."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x
