"""DTensors and what they hold: the local part of a tensor, and tensors made like another."""

import math

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def with_data(tensor: Tensor, data: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return data of this rank's shard, sharded as a parameter or a gradient is.

    Args:
        tensor: a DTensor; for any other the data is returned as it is.
        data: this rank's part of the result.
        shape: global shape of a contiguous result; None: shape and strides of `tensor`.
    """
    if not isinstance(tensor, DTensor):
        return data
    stride = tensor.stride()
    if shape is not None:
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        data,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape if shape is None else torch.Size(shape),
        stride=stride,
    )


def waited(x: Tensor) -> Tensor:
    """Wait for the collective that still fills a tensor, if one does, and return the tensor."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x
