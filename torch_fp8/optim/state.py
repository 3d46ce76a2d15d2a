"""The state that an optimizer keeps for a parameter, and its form in a checkpoint.

A large weight has 8-bit moments, a small one float32 moments. In memory the state of a large weight
is torch.optim.AdamW's, a flat dict of tensors:

========================  ========================================================================
``step``                  () float32 on the CPU, as torch.optim.AdamW's
``exp_avg``               `Float8Moment` of the parameter's shape, which reads as float32, or
                          `RatioMoment` in 4 bits
``exp_avg_sq``            `Float8Moment`
========================  ========================================================================

You may write to the moments or assign others: the next step quantizes those that are plain.

In a checkpoint it has torch.optim.AdamW's own names, shapes and dtype (``step``, ``exp_avg``,
``exp_avg_sq`` float32), so that stock AdamW opens it; beside them stands the ``residual`` of a
weight that its user holds in BF16 (`torch_fp8.optim.residual`). With
``FP8Config(checkpoint_states="fp8")`` it has the codes and scales of the moments instead
(`torch_fp8.optim.encoded_states`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.optim.encoded_states import (
    decoded,
    encoded_entry,
    is_ratio,
    restore,
    shards_rows,
)
from torch_fp8.quantization import ratio_int4
from torch_fp8.quantization.block_scaled import MIN_NUMEL, matrix_shape
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.float8_moment import MOMENT_FORMATS, Float8Moment
from torch_fp8.tensor.quantized_state import QuantizedState
from torch_fp8.tensor.ratio_moment import RatioMoment

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


def small_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a small parameter is stepped: float32 if its own has fewer bits.

    In float16 the eps of AdamW is zero, and so is most of the second moment.
    """
    return torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype


def takes_ratio(parameter: Tensor) -> bool:
    """Return whether the first moment of a parameter can have 4 bits: it is large, a rank has whole
    rows, and these are multiples of 16.
    """
    whole_groups = matrix_shape(parameter.shape)[1] % ratio_int4.COLUMNS == 0
    return is_large(parameter) and whole_groups and shards_rows(parameter)


def new_moments(parameter: Tensor, *, ratio: bool = False) -> State:
    """Return zero moments and step of a large parameter.

    Args:
        parameter: the parameter.
        ratio: whether the first one has 4 bits.
    """
    state: State = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    moments: dict[str, QuantizedState] = {
        name: Float8Moment.zeros(local(parameter), format)
        for name, format in MOMENT_FORMATS.items()
    }
    if ratio:
        moments["exp_avg"] = RatioMoment.beside(moments["exp_avg_sq"])
    shape = tuple(parameter.shape)
    return state | {name: with_data(parameter, value, shape) for name, value in moments.items()}


def settle_moments(parameter: Tensor, state: State, *, ratio: bool = False) -> None:
    """Give moments that somebody has assigned or written the form that the step takes.

    Args:
        parameter: the parameter.
        state: its state.
        ratio: whether the first one has 4 bits.
    Raises:
        KeyError: a moment is missing.
        ValueError: a moment has another shape than the parameter.
    """
    large = is_large(parameter)
    dtype = small_dtype(parameter)
    # The second one first, to which the first one may be a ratio.
    for name, format in reversed(MOMENT_FORMATS.items()):
        value = state[name]
        shard = local(value)
        in_4_bits = ratio and name == "exp_avg"
        if large:
            settled = isinstance(shard, Float8Moment)
        else:
            settled = value.dtype == dtype and shard.__class__ is Tensor
        if in_4_bits:
            second = local(state["exp_avg_sq"])
            settled = isinstance(shard, RatioMoment) and shard.is_beside(second)
        if settled and shard.shape == local(parameter).shape:
            continue
        if value.shape not in (parameter.shape, local(parameter).shape):
            raise ValueError(
                f"optimizer.state[p][{name!r}] has shape {tuple(value.shape)}, but p has "
                f"{tuple(parameter.shape)}; assign one of the same shape"
            )
        if in_4_bits:
            target = RatioMoment.beside(second, shard)
        elif large:
            target = Float8Moment.zeros(local(parameter), format)
            target.store(shard)
            if name == "exp_avg":
                local(state["exp_avg_sq"]).first = None  # that it was a ratio to
        else:
            target = plain(shard).to(local(parameter).device, dtype)
        state[name] = with_data(parameter, target, tuple(parameter.shape))


def moment(state: State, name: str) -> Any:
    """Return codes and scales of ``exp_avg`` or ``exp_avg_sq`` of this rank's shard."""
    return local(state[name]).codes


def to_checkpoint(parameter: Tensor, state: State, *, encoded: bool = False) -> State:
    """Return the state in torch.optim.AdamW's format, on the CPU (a DTensor's stays where it
    is).

    Args:
        parameter: the parameter.
        state: the state that its optimizer keeps for it.
        encoded: whether 8-bit moments stay as they are stored.
    """
    entry: State = {"step": state["step"].clone()}
    for name in MOMENT_FORMATS:
        value = state.get(name)
        if isinstance(local(value), QuantizedState):
            if encoded and shards_rows(parameter) and _is_settled(state, name):
                entry |= encoded_entry(name, local(value), parameter, _saved_on(parameter))
                continue
            dense = local(value).dequantize(_saved_on(parameter))
            entry[name] = with_data(parameter, dense, tuple(parameter.shape))
        elif value is not None:
            entry[name] = _copied(value)
    return entry


def _is_settled(state: State, name: str) -> bool:
    """Return whether a moment's codes say what it is, together with those of the second one."""
    shard = local(state[name])
    return not isinstance(shard, RatioMoment) or shard.is_beside(local(state["exp_avg_sq"]))


def from_checkpoint(
    parameter: Tensor, entry: Mapping[str, Any], *, large: bool, ratio: bool = False
) -> State:
    """Return the state in memory from torch.optim.AdamW's format; moments round to nearest.

    The residual, which belongs to the weight, is left to the caller.

    Args:
        parameter: the parameter.
        entry: its entry of the checkpoint.
        large: whether its moments have 8 bits.
        ratio: whether the first of them has 4.
    """
    step = entry["step"]
    step = (
        step.detach().float().cpu().clone()
        if isinstance(step, Tensor)
        else torch.tensor(float(step), device="cpu", dtype=torch.float32)
    )
    if not large or not shards_rows(parameter) or is_ratio(entry) != ratio:
        entry = decoded(entry)
    if not large:
        dtype = small_dtype(parameter)
        return {
            "step": step,
            **{
                name: entry[name].detach().to(device=parameter.device, dtype=dtype, copy=True)
                for name in MOMENT_FORMATS
            },
        }
    state = {**new_moments(parameter, ratio=ratio), "step": step}
    for name in reversed(MOMENT_FORMATS):
        if name in entry:
            local(state[name]).encode(local(entry[name]).detach())
        else:
            restore(name, entry, local(state[name]))
    return state


def _copied(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.clone()
    return tensor.detach().to(device=_saved_on(tensor), copy=True)


def _saved_on(tensor: Tensor) -> torch.device:
    if isinstance(tensor, DTensor):
        return local(tensor).device  # from there torch.distributed.checkpoint gathers or writes it
    return tensor.device if tensor.device.type == "meta" else torch.device("cpu")
