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

from torch_fp8.optim.state import SMALL_RESIDUAL_BITS, is_large
from torch_fp8.quantization.block_scaled import matrix_shape, row_parts
from torch_fp8.quantization.split_float import pack, split, stored_cols, unpack
from torch_fp8.tensor.dtensor import local, part_of, with_data
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.halves import EXACT_BITS, empty_residual, join_matrix
from torch_fp8.tensor.split_weight import halves_of

_ATTRIBUTE = "_fp8_residual"


def residual_of(weight: Tensor) -> Tensor | None:
    """Return the stored residual of this rank's part of a weight; None if it has none."""
    halves = halves_of(weight)
    if halves is not None:
        return halves.residual
    known = known_residual(weight)
    return None if known is None else known[0]


def known_residual(weight: Tensor) -> tuple[Tensor, int] | None:
    """Return the stored residual of a BF16 weight and its number of bits; None if it has none."""
    known: tuple[Tensor, int] | None = vars(weight).get(_ATTRIBUTE)
    if known is None or weight.dtype != torch.bfloat16:
        return None
    fits = known[0].numel() == math.prod(residual_shape(local(weight).shape, known[1]))
    return known if fits else None  # another shape: the weight's data were exchanged


def set_residual(weight: Tensor, stored: Tensor | None, bits: int) -> None:
    """Set the stored residual of this rank's part of a BF16 weight; None removes it."""
    vars(weight).pop(_ATTRIBUTE, None)
    if stored is not None:
        # A plain tuple, because torch.load(weights_only=True) must read it if a user saves
        # Parameters instead of their data.
        setattr(weight, _ATTRIBUTE, (stored, bits))


def settled_residual(weight: Tensor, bits: int) -> Tensor | None:
    """Return the residual of a BF16 weight with `bits` bits on its device; zeros if it has none."""
    shard, known = local(weight), known_residual(weight)
    if not bits:
        set_residual(weight, None, 0)
        return None
    if known is not None and known[1] == bits and known[0].device == shard.device:
        stored: Tensor = known[0]
        return stored
    if known is None:
        stored = zero_residual(shard, bits)
    else:
        stored = with_bits(shard, known[0].to(shard.device), known[1], bits)
    set_residual(weight, stored, bits)
    return stored


def drop_residuals(optimizer: Optimizer) -> None:
    """Free the residuals of BF16 weights whose optimizer does not use them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            set_residual(parameter, None, 0)


@torch.no_grad()
def split_parts(parameter: nn.Parameter, parts: Any, bits: int) -> None:
    """Fill a BF16 Parameter from float32 values, some rows at a time, and keep the residual.

    The BF16 value and the residual together are within a relative ``2 ** -(8 + bits)`` of the
    weight: rounding to nearest has an error of half a unit in 8 + `bits` significant bits.

    Args:
        parameter: (N, K) bfloat16, contiguous, or stacked (E, N, K); its values are replaced.
        parts: pairs of a row slice and float32 values (rows, K) that together cover all N rows, or
            E * N rows if stacked.
        bits: the residual bits of large weights, 8, 4 or 0; a small weight has 16.
    """
    bits = bits if is_large(parameter) else SMALL_RESIDUAL_BITS
    stored = zero_residual(parameter, bits) if bits else None
    matrix = parameter.view(matrix_shape(parameter.shape))  # (N, K), or (E, N, K) -> (E * N, K)
    for rows, value in parts:
        high, residual = split(value, bits)
        matrix[rows] = high
        if stored is not None:
            assert residual is not None
            stored[rows] = pack(residual, bits)
    set_residual(parameter, stored, bits)


def join_weight(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight with its residual, as a plain float32 tensor."""
    shard = plain(local(weight.detach()))
    known = known_residual(weight)
    return shard.float() if known is None else join_matrix(shard, *known)


def zero_residual(shard: Tensor, bits: int) -> Tensor:
    """Return the zero residual of a shard whose values are exactly BF16."""
    empty = empty_residual(shard, bits)
    dtype = torch.int16 if bits == EXACT_BITS else torch.int8
    return torch.zeros(1, 0, dtype=dtype, device=shard.device) if empty is None else empty.zero_()


def residual_shape(shape: torch.Size, bits: int) -> tuple[int, int]:
    """Return the shape of the stored residual of a whole parameter."""
    rows, cols = matrix_shape(shape) if len(shape) > 1 else (1, math.prod(shape))
    return rows, stored_cols(cols, bits)


def with_bits(shard: Tensor, saved: Tensor, saved_bits: int, bits: int) -> Tensor:
    """Return a shard's residual with `bits` bits; if it had more, it is rounded to nearest."""
    target = zero_residual(shard, bits)
    if not bits or not shard.numel():
        return target
    source = local(saved).contiguous().view(torch.int16 if saved_bits == 16 else torch.int8)
    source = source.view(residual_shape(shard.shape, saved_bits))
    if saved_bits == bits:
        target.copy_(source)
        return target
    cols = matrix_shape(shard.shape)[1]
    for part in row_parts(target.shape[0], cols):
        wide = unpack(source[part].to(target.device), saved_bits, cols)
        if bits > saved_bits:
            wide = wide << (bits - saved_bits)
        else:
            dropped = saved_bits - bits
            wide = (wide + (1 << dropped >> 1)) >> dropped
            wide = wide.clamp(max=(1 << (bits - 1)) - 1)
        target[part] = pack(wide, bits)
    return target


def residual_to_checkpoint(weight: Tensor, bits: int) -> Tensor | None:
    """Return a BF16 weight's residual for a checkpoint: on the CPU, or as a DTensor.

    It has the `bits` of the optimizer's options, which may have changed since the last step.
    A sharded parameter's residual is saved as int8 (S, n), where S is the size of the parameter's
    first dimension. The matrix of a vector or of stacked matrices has other rows than those that
    the parameter is sharded by, and neither gloo nor NCCL can send int16.
    """
    known = known_residual(weight)
    if known is None or not bits:
        return None
    stored, known_bits = known
    if known_bits != bits:
        stored = with_bits(local(weight), stored, known_bits, bits)
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
    if not isinstance(parameter, DTensor) or isinstance(saved, DTensor) or not saved.numel():
        return saved
    rows = parameter.shape[0]
    if local(parameter).shape == parameter.shape:
        return saved
    return part_of(parameter, saved.contiguous().view(torch.int8).view(rows, -1))
