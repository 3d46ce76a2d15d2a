"""Moments in a checkpoint in their stored form, codes and scales: 1.03 bytes per element.

A moment of shape (..., K), for example ``exp_avg``, becomes two tensors beside ``step``::

    exp_avg_codes   (..., K) uint8
    exp_avg_scale   (..., ceil(K / 32)) uint8, one for each group of 32 along the last dimension

The formats are those of `torch_fp8.tensor.float8_moment.MOMENT_FORMATS`; the checkpoint names them.
If the last dimension is tiny, groups run along all dimensions but the first (`matrix_shape`), and
the scales have two dimensions. Codes and scales are sharded like their parameter if each rank has
whole rows of it. Moments of parameters that are sharded along columns are always float32 in a
checkpoint.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.quantization.block_scaled import BlockScaled, matrix_shape, num_groups
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.float8_moment import MOMENT_FORMATS, Float8Moment

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


def encoded_entry(
    name: str, moment: Float8Moment, parameter: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Return the codes and scales of a moment, this rank's part, under their checkpoint names.

    Args:
        name: the name of the moment.
        moment: this rank's part.
        parameter: the moment's parameter, sharded by rows or not sharded.
        device: the device of the returned tensors.
    """
    entry = {}
    for (part, of), stored in zip(_PARTS.items(), moment.codes, strict=True):
        data = stored.view(of(moment.shape)).to(device, copy=True)
        entry[f"{name}_{part}"] = with_data(parameter, data, of(parameter.shape))
    return entry


def is_encoded(name: str, entry: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint entry has the codes of a moment."""
    return f"{name}_codes" in entry


def restore(name: str, entry: Mapping[str, Any], moment: Float8Moment) -> None:
    """Copy the codes and scales of a checkpoint entry into a moment."""
    for part, target in zip(_PARTS, moment.codes, strict=True):
        target.copy_(local(entry[f"{name}_{part}"]).reshape(target.shape))


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


def misfit(name: str, entry: Mapping[str, Any], parameter: Tensor) -> str | None:
    """Explain why an entry's codes and scales do not fit a parameter; None if they fit."""
    for part, of in _PARTS.items():
        value = entry.get(f"{name}_{part}")
        if not isinstance(value, Tensor) or value.dtype != torch.uint8:
            return f"[{f'{name}_{part}'!r}] is not a uint8 tensor: {value!r:.80}"
        fits = [of(parameter.shape), of(local(parameter).shape)]
        if tuple(value.shape) not in fits:
            return f"[{f'{name}_{part}'!r}] has shape {tuple(value.shape)}, expected {fits[0]}"
    return None
