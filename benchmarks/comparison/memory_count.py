"""Bytes per parameter of a model in training, counted from its tensors."""

import torch
from torch import Tensor, nn


def bytes_per_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of weights, gradients and optimizer state over the number of parameters."""
    return sum(bytes_by_kind(model, optimizer).values())


def bytes_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the same apart: bytes per parameter of weights, gradients and optimizer state."""
    parameters = list(model.parameters())
    kinds = {
        "weights": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0  # not AdamW's step counters
        ],
    }
    count = sum(p.numel() for p in parameters)
    return {kind: sum(map(_num_bytes, tensors)) / count for kind, tensors in kinds.items()}


def _num_bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # made of others: a payload and its scale, say
        names, _ = tensor.__tensor_flatten__()
        return sum(_num_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
