"""Muon's step for a weight that FSDP2 has sharded by rows, with a single int8 collective.

``torch.optim.Muon`` on DTensors would gather a matrix several times in each of its five
Newton-Schulz steps, in BF16. Here each rank updates its part of the momentum, quantizes its part of
the matrix to be orthogonalized, and all-gathers the codes once: 1.03 bytes per element. Each rank
then computes the whole update and applies its own rows.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.optim.step import shard_origin
from torch_fp8.quantization.linear_int8 import LinearInt8, decode, encode
from torch_fp8.tensor.dtensor import local, with_data

_COLUMNS = 1


def steps_by_shards(parameter: Tensor) -> bool:
    """Return whether a weight is a matrix sharded by rows."""
    return (
        isinstance(parameter, DTensor)
        and parameter.ndim == 2
        and all(p.is_replicate() or p.is_shard(0) for p in parameter.placements)
    )


def step_shard(weight: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    """Step this rank's part of a weight as ``torch.optim.Muon`` would step the whole.

    Args:
        weight: float32 DTensor (R, K) with its gradient.
        momentum: float32 DTensor (R, K) of the same sharding.
        group: options of ``torch.optim.Muon``.
    """
    assert weight.grad is not None
    grad, buffer, shard = (local(t.detach()) for t in (weight.grad, momentum, weight))
    beta, rate = group["momentum"], float(group["lr"])
    buffer.lerp_(grad, 1 - beta)
    update = grad.lerp(buffer, beta) if group["nesterov"] else buffer
    row, _, _ = shard_origin(weight)
    whole = _orthogonal(_gathered(weight, update), group)
    shard.mul_(1 - rate * group["weight_decay"])
    rows = whole[row : row + len(shard)].to(shard.dtype)  # (R, K) -> (R / ranks, K)
    shard.add_(rows, alpha=-rate * _adjustment(weight.shape, group["adjust_lr_fn"]))


def _gathered(weight: Tensor, update: Tensor) -> Tensor:
    """All-gather an update's int8 codes: (R / ranks, K) float32 on each rank -> (R, K) bfloat16."""
    codes, scale = encode(update)
    message = torch.cat([codes, scale.view(torch.int8)], _COLUMNS)  # (R / ranks, K + 2 groups)
    shape = weight.shape[0], message.shape[_COLUMNS]
    whole: Any = with_data(weight, message, shape)
    # (R, K) and (R, 2 groups)
    codes, scale = whole.full_tensor().split([codes.shape[1], 2 * scale.shape[1]], _COLUMNS)
    return decode(LinearInt8(codes, scale.contiguous().view(torch.bfloat16))).bfloat16()


def _orthogonal(x: Tensor, group: dict[str, Any]) -> Tensor:
    """Run the Newton-Schulz iteration on (R, K) in BF16, as ``torch.optim.Muon`` does."""
    a, b, c = group["ns_coefficients"]
    tall = x.shape[0] > x.shape[1]
    y = x.T if tall else x  # wide, so that the Gram matrix is the smaller one
    y = y / y.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


def _adjustment(shape: torch.Size, name: str | None) -> float:
    """Return the learning rate factor for a matrix of this shape."""
    rows, cols = shape
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols)) if name in (None, "original") else 1.0
