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
the moments in their stored form, codes and scales, 1.03 bytes per element. A moment of shape
(..., K), for example ``exp_avg``, becomes two tensors::

    exp_avg_codes   (..., K) uint8
    exp_avg_scale   (..., ceil(K / 32)) uint8, one for each group of 32 along the last dimension

The formats are `torch_fp8.tensor.quantized_state.MOMENT_FORMATS`; the checkpoint names them.
If the last dimension is tiny, groups run along all dimensions but the first (`matrix_shape`), and
the scales have two dimensions. Codes and scales are sharded like their parameter if each rank has
whole rows of it. Moments of parameters that are sharded along columns are always float32 in a
checkpoint.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.quantization.block_scaled import MIN_NUMEL, BlockScaled, matrix_shape, num_groups
from torch_fp8.tensor.dtensor import local, part_of, with_data
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.quantized_state import MOMENT_FORMATS, Float8Moment, QuantizedState

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


def new_state(parameter: Tensor) -> State:
    """Return a parameter's state before its first step: zero moments and a zero step count."""
    state: State = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    large, like = is_large(parameter), parameter.detach()
    for name, format in MOMENT_FORMATS.items():
        if large:
            moment = Float8Moment.zeros(local(parameter), format)
            state[name] = with_data(parameter, moment, tuple(parameter.shape))
        else:
            state[name] = torch.zeros_like(like, dtype=small_dtype(parameter))
    return state


def settle_state(parameter: Tensor, state: State) -> None:
    """Create a state, or bring what was assigned or moved outside to the step's form and device.

    Args:
        parameter: the parameter.
        state: its state, changed in place.
    Raises:
        KeyError: a moment is missing.
        ValueError: a moment and the parameter have different shapes.
    """
    if "step" not in state:
        state.update(new_state(parameter))
    if not state["step"].is_cpu:
        state["step"] = state["step"].cpu()
    large, like = is_large(parameter), local(parameter)
    cls, dtype = (Float8Moment, torch.float32) if large else (Tensor, small_dtype(parameter))
    for name, format in MOMENT_FORMATS.items():
        value = state[name]
        if value.device != like.device:
            value = state[name] = value.to(like.device)
        shard = local(value)
        if shard.__class__ is cls and shard.dtype == dtype and shard.shape == like.shape:
            continue
        if value.shape not in (parameter.shape, like.shape):
            raise ValueError(
                f"optimizer.state[p][{name!r}] has shape {tuple(value.shape)}, but p has "
                f"{tuple(parameter.shape)}; assign one of the same shape"
            )
        if large:
            target = Float8Moment.zeros(like, format)
            target.store(shard)
        else:
            target = plain(shard).to(like.device, dtype)
        state[name] = with_data(parameter, target, tuple(parameter.shape))


def to_checkpoint(parameter: Tensor, state: State, *, encoded: bool = False) -> State:
    """Return the state in torch.optim.AdamW's format, on the CPU; a DTensor stays on its device.

    Args:
        parameter: the parameter.
        state: its optimizer state.
        encoded: whether 8-bit moments stay encoded.
    """
    entry: State = {"step": state["step"].clone()}
    for name in MOMENT_FORMATS:
        value = state.get(name)
        if isinstance(local(value), QuantizedState):
            if encoded and shards_rows(parameter):
                for (part, of), stored in zip(_PARTS.items(), local(value).codes, strict=True):
                    data = stored.view(of(local(value).shape)).to(_saved_on(parameter), copy=True)
                    entry[f"{name}_{part}"] = with_data(parameter, data, of(parameter.shape))
                continue
            dense = local(value).dequantize(_saved_on(parameter))
            entry[name] = with_data(parameter, dense, tuple(parameter.shape))
        elif value is not None:
            entry[name] = value.detach().to(device=_saved_on(value), copy=True)
    return entry


def from_checkpoint(parameter: Tensor, entry: Mapping[str, Any]) -> State:
    """Return the in-memory state of a checkpoint entry; float32 moments round to nearest.

    The residual belongs to the weight, so the caller loads it.
    """
    entry = {
        name: part_of(parameter, x) if isinstance(x, Tensor) else x for name, x in entry.items()
    }
    step = torch.as_tensor(entry["step"], dtype=torch.float32, device="cpu").detach().clone()
    if not is_large(parameter) or not shards_rows(parameter):
        entry = decoded(entry)
    state = {**new_state(parameter), "step": step}
    for name in MOMENT_FORMATS:
        moment = local(state[name])
        if name in entry and isinstance(moment, Float8Moment):
            moment.store(local(entry[name]))  # a few rows at a time
        elif name in entry:
            moment.copy_(local(entry[name]))
        else:
            for part, target in zip(_PARTS, moment.codes, strict=True):
                target.copy_(local(entry[f"{name}_{part}"]).reshape(target.shape))
    return state


def _saved_on(tensor: Tensor) -> torch.device:
    if isinstance(tensor, DTensor):
        return local(tensor).device  # torch.distributed.checkpoint gathers or writes it from there
    return tensor.device if tensor.device.type == "meta" else torch.device("cpu")


FORMATS_KEY = "moment_formats"
"""The checkpoint option that names the formats of the codes."""
STATE_FORMATS = {name: format.name for name, format in MOMENT_FORMATS.items()}


def _rows_of(shape: torch.Size, cols: int) -> tuple[int, ...]:
    """Return the shape of a tensor with `cols` columns for each row of a parameter's matrix."""
    leading = shape[:-1] if matrix_shape(shape)[0] == math.prod(shape[:-1]) else shape[:1]
    return (*leading, cols)


_PARTS: dict[str, Callable[[torch.Size], tuple[int, ...]]] = {
    "codes": tuple,
    "scale": lambda shape: _rows_of(shape, num_groups(matrix_shape(shape)[1])),
}
"""The parts of a moment, each with a function from the parameter's shape to the part's shape."""


def shards_rows(parameter: Tensor) -> bool:
    """Return whether each rank holds whole rows of a parameter."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return all(getattr(placement, "dim", 0) == 0 for placement in placements)


def shard_origin(parameter: Tensor) -> tuple[int, int, int]:
    """Return where this rank's shard starts in the whole matrix.

    Returns:
        (row, column, the whole matrix's number of columns).
    """
    if not isinstance(parameter, DTensor):
        return 0, 0, matrix_shape(parameter.shape)[1]
    (chunk,) = parameter.__create_chunk_list__()
    row_length = matrix_shape(parameter.shape)[1]
    element = sum(o * s for o, s in zip(chunk.offsets, parameter.stride(), strict=True))
    return element // row_length, element % row_length, row_length


def is_encoded(name: str, entry: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint entry has the codes of a moment."""
    return f"{name}_codes" in entry


def decoded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with float32 moments, in torch.optim.AdamW's format."""
    plain = dict(entry)
    for name, format in MOMENT_FORMATS.items():
        if not is_encoded(name, entry):
            continue
        like = entry[f"{name}_codes"]
        codes, scale = (local(plain.pop(f"{name}_{part}")) for part in _PARTS)
        rows, cols = matrix_shape(codes.shape)
        # (rows, K) and (rows, ceil(K / 32))
        stored = BlockScaled(codes.reshape(rows, cols), scale.reshape(rows, -1))
        value = Float8Moment(stored, codes.shape, format).dequantize()
        plain[name] = with_data(like, value, tuple(like.shape))
    return plain


def misfits(name: str, entry: Mapping[str, Any], parameter: Tensor) -> Iterator[str]:
    """Explain why an entry's codes and scales do not fit a parameter, the first reason first."""
    for part, of in _PARTS.items():
        value = entry.get(f"{name}_{part}")
        if not isinstance(value, Tensor) or value.dtype != torch.uint8:
            yield f"[{f'{name}_{part}'!r}] is not a uint8 tensor: {value!r:.80}"
            continue
        fits = [of(parameter.shape), of(local(parameter).shape)]
        if tuple(value.shape) not in fits:
            yield f"[{f'{name}_{part}'!r}] has shape {tuple(value.shape)}, expected {fits[0]}"
