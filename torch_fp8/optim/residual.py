"""The residual of a weight that the user holds in BF16: the weight's bits below BF16.

The weight remains the user's Parameter and reads as BF16. Its residual
(`torch_fp8.quantization.split_float`) is an attribute of the Parameter, so it survives a change of
the optimizer. The optimizer's step changes both. Loading an FP8 checkpoint also sets residuals,
because its weights, codes times float32 scales, have more bits than BF16.

Writes to the weight are not detected: code that writes it stores BF16 values, and the residual
stays. Weight and residual together are then within half a BF16 spacing of the written value. A deep
copy of the Parameter has no residual, and neither do the Parameters that `fully_shard` creates.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.optim.state import is_large
from torch_fp8.quantization.block_scaled import matrix_shape
from torch_fp8.quantization.split_float import (
    EXACT_BITS,
    RESIDUAL_BITS,
    residual_dtype,
    split,
)
from torch_fp8.tensor.dtensor import local, part_of, with_data
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.halves import empty_residual, join_matrix
from torch_fp8.tensor.split_weight import halves_of

_ATTRIBUTE = "_fp8_residual"


def residual_of(weight: Tensor) -> Tensor | None:
    """Return the stored residual of this rank's part of a weight, or None if it has none."""
    halves = halves_of(weight)
    if halves is not None:
        return halves.residual
    known = known_residual(weight)
    return None if known is None else known[0]


def residual_bits(weight: Tensor) -> int:
    """Return the residual bits of a BF16 weight: 8, or 16 if it is small, to be exact."""
    return RESIDUAL_BITS if is_large(weight) else EXACT_BITS


def known_residual(weight: Tensor) -> tuple[Tensor, int] | None:
    """Return the stored residual of a BF16 weight and its number of bits, if it has one."""
    known: tuple[Tensor, int] | None = vars(weight).get(_ATTRIBUTE)
    if known is None or weight.dtype != torch.bfloat16:
        return None
    if known[0].numel() != math.prod(residual_shape(local(weight).shape, known[1])):
        return None  # another shape: the weight's data were exchanged
    return known


def set_residual(weight: Tensor, stored: Tensor | None) -> None:
    """Set the stored residual of this rank's part of a BF16 weight; None removes it."""
    vars(weight).pop(_ATTRIBUTE, None)
    if stored is not None:
        # A plain tuple, because torch.load(weights_only=True) must read it if a user saves
        # Parameters instead of their data.
        setattr(weight, _ATTRIBUTE, (stored, residual_bits(weight)))


def settled_residual(weight: Tensor) -> Tensor:
    """Return the residual of a BF16 weight on its device; zeros if it has none."""
    shard, known = local(weight), known_residual(weight)
    if known is not None and known[0].device == shard.device:
        return known[0]
    bits = residual_bits(weight)
    stored = zero_residual(shard, bits) if known is None else known[0].to(shard.device)
    set_residual(weight, stored)
    return stored


def drop_residuals(optimizer: Optimizer) -> None:
    """Free the residuals of BF16 weights whose optimizer does not use them."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        set_residual(parameter, None)


@torch.no_grad()
def split_parts(parameter: nn.Parameter, parts: Any, *, residual: bool = True) -> None:
    """Fill a BF16 Parameter from float32 values, some rows at a time, and keep the residual.

    The BF16 value and the residual together are within a relative 2^-16 of the weight: rounding to
    nearest has an error of half a unit in 16 significant bits.

    Args:
        parameter: (N, K) bfloat16, contiguous, or stacked (E, N, K); its values are replaced.
        parts: pairs of a row slice and float32 values (rows, K) that together cover all N rows, or
            E * N rows if stacked.
        residual: whether a large weight gets a residual; a small one always does.
    """
    bits = residual_bits(parameter) if residual or not is_large(parameter) else 0
    stored: Any = zero_residual(parameter, bits) if bits else None
    matrix = parameter.view(matrix_shape(parameter.shape))  # (N, K), or (E, N, K) -> (E * N, K)
    for rows, value in parts:
        matrix[rows], lower = split(value, bits)
        if stored is not None:
            stored[rows] = lower
    set_residual(parameter, stored)


def join_weight(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight with its residual, as a plain float32 tensor."""
    shard = plain(local(weight.detach()))
    known = known_residual(weight)
    return shard.float() if known is None else join_matrix(shard, *known)


def zero_residual(shard: Tensor, bits: int) -> Tensor:
    """Return the zero residual of a shard whose values are exactly BF16."""
    empty = empty_residual(shard, bits)
    if empty is None:
        return torch.zeros(1, 0, dtype=residual_dtype(bits), device=shard.device)
    return empty.zero_()


def residual_shape(shape: torch.Size, bits: int) -> tuple[int, int]:
    """Return the shape of the stored residual of a whole parameter.

    Raises:
        ValueError: the residual has 4 bits, as 0.1.0 could store it.
    """
    if bits == 4:
        raise ValueError(
            "this checkpoint or pickle has residuals of 4 bits, from FP8Config(residual_bits=4) of "
            "torch-fp8 0.1.0, which this version does not read; with 0.1.0, save "
            "torch_fp8.merged_state_dict(model, optimizer), whose weights are float32"
        )
    return matrix_shape(shape) if len(shape) > 1 else (1, math.prod(shape))


def loaded_residual(shard: Tensor, saved: Tensor, bits: int) -> Tensor:
    """Return a shard's residual from a checkpoint or pickle, on the shard's device.

    Args:
        shard: this rank's part of the weight.
        saved: its residual, of any shape.
        bits: its number of bits.
    """
    if not shard.numel():
        return zero_residual(shard, bits)
    source = local(saved).contiguous().view(residual_dtype(bits))
    return source.view(residual_shape(shard.shape, bits)).to(shard.device, copy=True)


def residual_to_checkpoint(weight: Tensor) -> Tensor | None:
    """Return a BF16 weight's residual for a checkpoint: on the CPU, or as a DTensor.

    A sharded parameter's residual is saved as int8 (S, n), where S is the size of the parameter's
    first dimension. The matrix of a vector or of stacked matrices has other rows than those that
    the parameter is sharded by, and neither gloo nor NCCL can send int16.
    """
    known = known_residual(weight)
    if known is None:
        return None
    stored, bits = known
    if not isinstance(weight, DTensor):
        return stored.detach().to("meta" if weight.is_meta else "cpu", copy=True)
    shape = sharded_residual_shape(weight, residual_shape(weight.shape, bits), bits)
    shard = stored.contiguous().view(torch.int8)
    rows = local(weight).shape[0]
    cols = shard.numel() // rows if rows else shape[1]  # fewer than n if columns are sharded
    # (S / ranks, n), or fewer columns
    return with_data(weight, shard.view(rows, cols).clone(), shape)


def sharded_residual_shape(parameter: Tensor, shape: tuple[int, ...], bits: int) -> tuple[int, int]:
    """Return (S, n), the shape of a residual that `residual_to_checkpoint` shards."""
    size = 2 if bits == EXACT_BITS else 1
    return parameter.shape[0], math.prod(shape) * size // parameter.shape[0]


def shard_of(parameter: Tensor, saved: Tensor) -> Tensor:
    """Return this rank's part of a residual saved whole; a sharded one is returned as is."""
    is_whole = local(parameter).shape == parameter.shape
    if is_whole or isinstance(saved, DTensor) or not saved.numel():
        return saved
    rows = parameter.shape[0]
    return part_of(parameter, saved.contiguous().view(torch.int8).view(rows, -1))
