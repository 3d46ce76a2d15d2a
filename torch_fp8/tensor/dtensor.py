"""Helpers for DTensors: the local shard, and a DTensor with new data and the same layout."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; return any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def with_data(tensor: Tensor, data: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a DTensor with this rank's `data` and the placements of `tensor`.

    Args:
        tensor: DTensor with the placements; for any other tensor, return `data` unchanged.
        data: this rank's shard of the result.
        shape: global shape of a contiguous result, or None for the shape and strides of `tensor`.
    """
    if not isinstance(tensor, DTensor):
        return data
    if shape is None:
        size, stride = tensor.shape, tensor.stride()
    else:
        size = torch.Size(shape)
        stride = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(data, mesh, placements, run_check=False, shape=size, stride=stride)


def part_of(parameter: Tensor, saved: Tensor) -> Tensor:
    """Return this rank's part of a tensor that was saved whole, without communication.

    Args:
        parameter: parameter that the tensor belongs to.
        saved: tensor whose rows are those of the parameter; a part is returned as it is.
    """
    if not isinstance(parameter, DTensor) or isinstance(saved, DTensor) or not saved.ndim:
        return saved
    shard = local(parameter)
    if saved.shape[0] != parameter.shape[0] or shard.shape in (parameter.shape, saved.shape):
        return saved
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(saved.to(shard.device), mesh, placements, src_data_rank=None)


def waited(x: Tensor) -> Tensor:
    """Wait for the collective that fills a tensor, if there is one, and return the tensor."""
    return x.wait() if hasattr(x, "trigger_wait") else x  # only AsyncCollectiveTensor has it
