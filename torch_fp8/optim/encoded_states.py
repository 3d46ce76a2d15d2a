"""Moments in a checkpoint in their stored form, codes and scales: 1.03 bytes per element.

A moment of shape (..., K), for example ``exp_avg``, becomes two tensors beside ``step``::

    exp_avg_codes   (..., K) uint8
    exp_avg_scale   (..., ceil(K / 32)) uint8, one for each group of 32 along the last dimension

0.1.0 could also save a 4-bit first moment, relative to ``exp_avg_sq``; it is loaded into 8 bits::

    exp_avg_ratio_codes   (..., K / 2) int8
    exp_avg_ratio_scale   (..., K / 8) uint8

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
from torch_fp8.quantization.split_float import unpack_nibbles
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.float8_moment import MOMENT_FORMATS, Float8Moment

FORMATS_KEY = "moment_formats"
"""The checkpoint option that names the formats of the codes."""
STATE_FORMATS = {name: format.name for name, format in MOMENT_FORMATS.items()}
RATIO = "exp_avg_ratio"
VALID_FORMATS = STATE_FORMATS, STATE_FORMATS | {RATIO: "int4"}


def _rows_of(shape: torch.Size, cols: int) -> tuple[int, ...]:
    """Return the shape of a tensor with `cols` columns for each row of a parameter's matrix."""
    leading = shape[:-1] if matrix_shape(shape)[0] == math.prod(shape[:-1]) else shape[:1]
    return (*leading, cols)


_Parts = dict[str, Callable[[torch.Size], tuple[int, ...]]]
"""The parts of a moment, each with a function from the parameter's shape to the part's shape."""

_PARTS: _Parts = {
    "codes": tuple,
    "scale": lambda shape: _rows_of(shape, num_groups(matrix_shape(shape)[1])),
}
_RATIO_PARTS: _Parts = {
    "codes": lambda shape: _rows_of(shape, matrix_shape(shape)[1] // 2),
    "scale": lambda shape: _rows_of(shape, matrix_shape(shape)[1] // 8),
}
_RATIO = RATIO, _RATIO_PARTS


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
    return f"{name}_codes" in entry or (name == "exp_avg" and is_ratio(entry))


def is_ratio(entry: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint entry has the codes of a 4-bit first moment."""
    return f"{RATIO}_codes" in entry


def codes_of(name: str, entry: Mapping[str, Any]) -> Tensor:
    """Return the codes of a moment in a checkpoint entry."""
    key, _ = _form(name, entry)
    codes: Tensor = entry[f"{key}_codes"]
    return codes


def restore(name: str, entry: Mapping[str, Any], moment: Float8Moment) -> None:
    """Copy the codes and scales of a checkpoint entry into a moment."""
    for part, target in zip(_PARTS, moment.codes, strict=True):
        target.copy_(local(entry[f"{name}_{part}"]).reshape(target.shape))


def decoded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with float32 moments, in torch.optim.AdamW's format."""
    plain, second = dict(entry), None
    for name in reversed(MOMENT_FORMATS):
        if not is_encoded(name, entry):
            continue
        key, parts = _form(name, entry)
        codes, scale = (local(plain.pop(f"{key}_{part}")) for part in parts)
        if key == RATIO:
            assert second is not None
            value = _decoded_ratio(codes, scale, second)
        else:
            like = entry[f"{name}_codes"]
            rows, cols = matrix_shape(codes.shape)
            # (rows, K) and (rows, ceil(K / 32))
            stored = BlockScaled(codes.reshape(rows, cols), scale.reshape(rows, -1))
            value = Float8Moment(stored, codes.shape, MOMENT_FORMATS[name]).dequantize()
            second = value
        plain[name] = with_data(like, value, tuple(like.shape))
    return plain


def _decoded_ratio(codes: Tensor, scale: Tensor, second: Tensor) -> Tensor:
    """Decode a 4-bit first moment: integers of its ratio to the root of the second, groups of 8.

    Args:
        codes: int8, -7..7 and -8 for NaN, two to a byte; (R, K / 2) if flattened to rows.
        scale: uint8, (R, K / 8) if flattened: five bits of mantissa, three of exponent.
        second: the second moment, float32, whose matrix is (R, K).
    """
    rows, cols = matrix_shape(second.shape)
    integers = unpack_nibbles(codes.reshape(rows, cols // 2), cols)  # (R, K / 2) -> (R, K)
    exponents = (scale.reshape(rows, cols // 8).to(torch.int32) + (120 << 5)) << 18
    scales = exponents.view(torch.float32).repeat_interleave(8, 1)  # (R, K / 8) -> (R, K)
    ratio = torch.where(integers == -8, torch.nan, integers.float()) * scales
    return ratio.view(second.shape) * second.double().sqrt().float()


def misfit(name: str, entry: Mapping[str, Any], parameter: Tensor) -> str | None:
    """Explain why an entry's codes and scales do not fit a parameter; None if they fit."""
    key, parts = _form(name, entry)
    dtype = torch.uint8
    if key == RATIO:
        dtype = torch.int8
        if not is_encoded("exp_avg_sq", entry):
            return f"[{key + '_codes'!r}] is a ratio to 'exp_avg_sq_codes', which are missing"
        if matrix_shape(parameter.shape)[1] % 16:
            return f"[{key + '_codes'!r}] needs a row length that is a multiple of 16"
    for part, of in parts.items():
        value = entry.get(f"{key}_{part}")
        dtype = torch.uint8 if part == "scale" else dtype
        if not isinstance(value, Tensor) or value.dtype != dtype:
            return f"[{f'{key}_{part}'!r}] is not a {str(dtype)[6:]} tensor: {value!r:.80}"
        fits = [of(parameter.shape), of(local(parameter).shape)]
        if tuple(value.shape) not in fits:
            return f"[{f'{key}_{part}'!r}] has shape {tuple(value.shape)}, expected {fits[0]}"
    return None


def _form(name: str, entry: Mapping[str, Any]) -> tuple[str, _Parts]:
    """Return the name prefix that a moment has in an entry, and its parts."""
    return _RATIO if name == "exp_avg" and is_ratio(entry) else (name, _PARTS)
