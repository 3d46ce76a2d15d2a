"""The state that an optimizer keeps for a parameter, and its form in a checkpoint.

A large weight has 8-bit moments and, where it is BF16, a residual; a small one has float32 moments,
and 16 residual bits where it is BF16. In memory the state of a large weight is torch.optim.AdamW's,
a flat dict of tensors, and its residual:

========================  ========================================================================
``step``                  () float32 on the CPU, as torch.optim.AdamW's
``exp_avg``               `Float8Moment` of the parameter's shape, which reads as float32
``exp_avg_sq``            `Float8Moment`
``residual``              int8 (R, K); (R, ceil(K / 2)) with 4 bits; int16 for a small weight
========================  ========================================================================

(R, K) is the parameter's matrix shape. You may write to the moments or assign others: the next step
quantizes those that are plain.

In a checkpoint it has torch.optim.AdamW's own names, shapes and dtype (``step``, ``exp_avg``,
``exp_avg_sq`` float32) beside ``residual``, so that stock AdamW opens it.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.quantization.block_scaled import (
    MIN_NUMEL,
    BlockScaled,
    matrix_shape,
    row_parts,
)
from torch_fp8.quantization.split_float import pack, stored_cols, unpack
from torch_fp8.quantization.stochastic_rounding import stream_keys
from torch_fp8.tensor.dtensor import like_parameter, local
from torch_fp8.tensor.float8_moment import MOMENT_FORMATS, Float8Moment
from torch_fp8.tensor.split_weight import SplitWeight

SMALL_RESIDUAL_BITS = 16
"""The residual bits of a small BF16 parameter: with them it is a float32 number."""


_DTYPES = (torch.float32, torch.bfloat16)

State = dict[str, Any]


def is_large(parameter: Tensor) -> bool:
    """Return whether a parameter has 8-bit moments: a float32 or BF16 matrix of 4,096 elements or
    more.
    """
    large = parameter.ndim >= 2 and parameter.numel() >= MIN_NUMEL
    return large and parameter.dtype in _DTYPES and not parameter.is_sparse


def new_moments(parameter: Tensor) -> State:
    """Return zero moments and step of a large parameter."""
    state: State = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name, format in MOMENT_FORMATS.items():
        zeros = Float8Moment.zeros(local(parameter), format)
        state[name] = like_parameter(parameter, zeros, tuple(parameter.shape))
    return state


def settle_moments(parameter: Tensor, state: State) -> None:
    """Give moments that somebody has assigned the form that the step takes.

    Raises:
        KeyError: a moment is missing.
        ValueError: a moment has another shape than the parameter.
    """
    large = is_large(parameter)
    dtype = torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype
    for name, format in MOMENT_FORMATS.items():
        value = state[name]
        shard = local(value)
        settled = isinstance(shard, Float8Moment) if large else value.dtype == dtype
        if settled and shard.shape == local(parameter).shape:
            continue
        if value.shape not in (parameter.shape, local(parameter).shape):
            raise ValueError(
                f"optimizer.state[p][{name!r}] has shape {tuple(value.shape)}, but p has "
                f"{tuple(parameter.shape)}; assign one of the same shape"
            )
        if large:
            target = Float8Moment.zeros(local(parameter), format)
            target.store(shard)
        else:
            target = shard.to(local(parameter).device, dtype)
        state[name] = like_parameter(parameter, target, tuple(parameter.shape))


def settle_weight(weight: SplitWeight, seed: int, state: State, index: int) -> None:
    """Give a weight that is about to be stepped the residual bits of a step.

    Args:
        weight: one that somebody may have written.
        seed, state, index: seed of the optimizer, state of the weight, whose ``step`` counts, and
            its index: they key the random bits.
    """
    halves = weight.halves
    if halves.bits != halves.step_bits:
        halves.settle(stream_keys(seed, -1 - int(state["step"]), index))
    halves.writes += 1


def moment(state: State, name: str) -> BlockScaled:
    """Return codes and scales of ``exp_avg`` or ``exp_avg_sq`` of this rank's shard."""
    codes: BlockScaled = local(state[name]).codes
    return codes


def zero_residual(parameter: Tensor, bits: int) -> Tensor:
    """Return the residual of a weight that is exactly BF16."""
    shard = local(parameter)
    rows, cols = matrix_shape(shard.shape) if shard.ndim > 1 else (1, shard.numel())
    dtype = torch.int16 if bits == 16 else torch.int8
    zeros = torch.zeros((rows, stored_cols(cols, bits)), dtype=dtype, device=shard.device)
    return like_parameter(parameter, zeros, residual_shape(parameter.shape, bits))


def residual_shape(shape: torch.Size, bits: int) -> tuple[int, int]:
    """Return the shape of the stored residual of a whole parameter."""
    rows, cols = matrix_shape(shape) if len(shape) > 1 else (1, math.prod(shape))
    return rows, stored_cols(cols, bits)


def residual_from_checkpoint(
    parameter: Tensor, saved: Tensor, saved_bits: int, bits: int
) -> Tensor:
    """Return a saved residual, rounded to nearest where it has more bits than are kept."""
    residual = zero_residual(parameter, bits)
    target = local(residual)
    if not bits:
        return residual
    source = local(saved).contiguous().view(torch.int16 if saved_bits == 16 else torch.int8)
    source = source.view(residual_shape(local(parameter).shape, saved_bits))
    if saved_bits == bits:
        target.copy_(source)
        return residual
    shard = local(parameter)
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
    return residual


def residual_to_checkpoint(parameter: Tensor, residual: Tensor) -> Tensor:
    """Return a residual as it is saved: on the CPU, or as a DTensor where it is.

    A sharded parameter's residual is saved as int8 (S, n), S the parameter's first dimension: the
    matrix of a vector, or of stacked matrices, has other rows than the parameter is sharded by, and
    neither gloo nor NCCL sends int16.
    """
    if not isinstance(parameter, DTensor):
        return _copied(residual)
    shape = sharded_residual_shape(parameter, residual.shape, residual.element_size())
    shard = local(residual).contiguous().view(torch.int8)
    rows = local(parameter).shape[0]
    cols = shard.numel() // rows if rows else shape[1]  # fewer where columns are sharded
    return like_parameter(parameter, shard.view(rows, cols).clone(), shape)


def sharded_residual_shape(
    parameter: Tensor, shape: tuple[int, ...], element_size: int
) -> tuple[int, int]:
    """Return the shape of a sharded parameter's residual as `residual_to_checkpoint` has it."""
    return parameter.shape[0], math.prod(shape) * element_size // parameter.shape[0]


def to_checkpoint(parameter: Tensor, state: State) -> State:
    """Return the state in torch.optim.AdamW's format, on the CPU (a DTensor's stays where it
    is).
    """
    entry: State = {"step": state["step"].clone()}
    for name in MOMENT_FORMATS:
        value = state.get(name)
        if isinstance(local(value), Float8Moment):
            dense = local(value).dequantize(_saved_on(parameter))
            entry[name] = like_parameter(parameter, dense, tuple(parameter.shape))
        elif value is not None:
            entry[name] = _copied(value)
    if "residual" in state:
        entry["residual"] = residual_to_checkpoint(parameter, state["residual"])
    return entry


def from_checkpoint(parameter: Tensor, entry: Mapping[str, Any], large: bool) -> State:
    """Return the state in memory from torch.optim.AdamW's format; moments round to nearest.

    The residual, which may be stored in another form, is left to the caller.
    """
    step = entry["step"]
    step = (
        step.detach().float().cpu().clone()
        if isinstance(step, Tensor)
        else torch.tensor(float(step), device="cpu")
    )
    if not large:
        dtype = torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype
        return {
            "step": step,
            **{
                name: entry[name].detach().to(device=parameter.device, dtype=dtype, copy=True)
                for name in MOMENT_FORMATS
            },
        }
    state = {**new_moments(parameter), "step": step}
    for name in MOMENT_FORMATS:
        local(state[name]).store(local(entry[name]).detach())
    return state


def _copied(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.clone()
    return tensor.detach().to(device=_saved_on(tensor), copy=True)


def _saved_on(tensor: Tensor) -> torch.device:
    if isinstance(tensor, DTensor):
        return local(tensor).device  # from there torch.distributed.checkpoint gathers or writes it
    return tensor.device if tensor.device.type == "meta" else torch.device("cpu")
