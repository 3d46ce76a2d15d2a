"""The optimizer state of a parameter, in memory and in a checkpoint.

A large weight has 8-bit moments, a small one float32 moments. In memory the state of a large weight
is a flat dict of tensors, as torch.optim.AdamW's is:

========================  ========================================================================
``step``                  () float32 on the CPU, as in torch.optim.AdamW
``exp_avg``               `Float8Moment` of the parameter's shape, which reads as float32
``exp_avg_sq``            `Float8Moment`
========================  ========================================================================

You may write to the moments or assign plain tensors; the next step quantizes them.

A checkpoint has torch.optim.AdamW's names, shapes and dtype (``step``, ``exp_avg``, ``exp_avg_sq``
float32), so stock AdamW can load it. A weight that the user holds in BF16 also has a ``residual``
there (`torch_fp8.optim.residual`). With ``FP8Config(checkpoint_states="fp8")`` the checkpoint has
the moments' codes and scales instead (`torch_fp8.optim.encoded_states`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.optim.encoded_states import (
    decoded,
    encoded_entry,
    restore,
    shards_rows,
)
from torch_fp8.quantization.block_scaled import MIN_NUMEL
from torch_fp8.tensor.dtensor import local, part_of, with_data
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.float8_moment import MOMENT_FORMATS, Float8Moment
from torch_fp8.tensor.quantized_state import QuantizedState

_DTYPES = (torch.float32, torch.bfloat16)

State = dict[str, Any]


def is_large(parameter: Tensor) -> bool:
    """Return whether a parameter gets 8-bit moments.

    It must be a float32 or BF16 tensor of at least 2 dimensions and 4,096 elements, and not sparse.
    """
    large = parameter.ndim >= 2 and parameter.numel() >= MIN_NUMEL
    return large and parameter.dtype in _DTYPES and not parameter.is_sparse


def small_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a small parameter is stepped: float32 if its own has fewer bits.

    In float16 AdamW's eps would round to zero, and so would most of the second moment.
    """
    return torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype


def new_moments(parameter: Tensor) -> State:
    """Return zero moments and a zero step count for a large parameter."""
    state: State = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name, format in MOMENT_FORMATS.items():
        moment = Float8Moment.zeros(local(parameter), format)
        state[name] = with_data(parameter, moment, tuple(parameter.shape))
    return state


def settle_moments(parameter: Tensor, state: State) -> None:
    """Convert moments that were assigned or written outside to the form that the step needs.

    Args:
        parameter: the parameter.
        state: its state, changed in place.
    Raises:
        KeyError: a moment is missing.
        ValueError: a moment and the parameter have different shapes.
    """
    large = is_large(parameter)
    dtype = small_dtype(parameter)
    for name, format in MOMENT_FORMATS.items():
        value = state[name]
        shard = local(value)
        if large:
            settled = isinstance(shard, Float8Moment)
        else:
            settled = value.dtype == dtype and shard.__class__ is Tensor
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
            target = plain(shard).to(local(parameter).device, dtype)
        state[name] = with_data(parameter, target, tuple(parameter.shape))


def to_checkpoint(parameter: Tensor, state: State, *, encoded: bool = False) -> State:
    """Return the state in torch.optim.AdamW's format, on the CPU; a DTensor stays on its device.

    Args:
        parameter: the parameter.
        state: the optimizer's state of it.
        encoded: whether 8-bit moments stay encoded.
    """
    entry: State = {"step": state["step"].clone()}
    for name in MOMENT_FORMATS:
        value = state.get(name)
        if isinstance(local(value), QuantizedState):
            if encoded and shards_rows(parameter):
                entry |= encoded_entry(name, local(value), parameter, _saved_on(parameter))
                continue
            dense = local(value).dequantize(_saved_on(parameter))
            entry[name] = with_data(parameter, dense, tuple(parameter.shape))
        elif value is not None:
            entry[name] = _copied(value)
    return entry


def from_checkpoint(parameter: Tensor, entry: Mapping[str, Any]) -> State:
    """Return the in-memory state of a checkpoint entry; float32 moments round to nearest.

    The residual belongs to the weight, so the caller loads it.
    """
    large = is_large(parameter)
    entry = {
        name: part_of(parameter, x) if isinstance(x, Tensor) else x for name, x in entry.items()
    }
    step = entry["step"]
    step = (
        step.detach().float().cpu().clone()
        if isinstance(step, Tensor)
        else torch.tensor(float(step), device="cpu", dtype=torch.float32)
    )
    if not large or not shards_rows(parameter):
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
    state = {**new_moments(parameter), "step": step}
    for name in MOMENT_FORMATS:
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
        return local(tensor).device  # torch.distributed.checkpoint gathers or writes it from there
    return tensor.device if tensor.device.type == "meta" else torch.device("cpu")
