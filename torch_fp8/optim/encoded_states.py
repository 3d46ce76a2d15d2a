"""Moments in a checkpoint as they are in memory: codes and scales, 1.03 bytes each.

A moment of shape (..., K), say ``exp_avg``, is two tensors beside ``step``::

    exp_avg_codes   (..., K) uint8
    exp_avg_scale   (..., ceil(K / 32)) uint8, of groups along the last dimension

or, in 4 bits and relative to ``exp_avg_sq``, which then is stored so, too::

    exp_avg_ratio_codes   (..., K / 2) int8
    exp_avg_ratio_scale   (..., K / 8) uint8

in the formats of `torch_fp8.tensor.float8_moment.MOMENT_FORMATS`, which the checkpoint names. Where
the last dimension is tiny, groups lie along all but the first one (`matrix_shape`), and the scales
have two dimensions. Both are sharded as their parameter is, where ranks have whole rows of it.
Moments of parameters that are sharded along columns are float32 in any checkpoint.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.quantization.block_scaled import BlockScaled, matrix_shape, num_groups
from torch_fp8.quantization.ratio_int4 import COLUMNS, GROUP, RatioInt4
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.float8_moment import MOMENT_FORMATS, Float8Moment
from torch_fp8.tensor.quantized_state import QuantizedState
from torch_fp8.tensor.ratio_moment import RatioMoment

FORMATS_KEY = "moment_formats"
"""The option of a checkpoint that names the formats of its codes."""
STATE_FORMATS = {name: format.name for name, format in MOMENT_FORMATS.items()}
RATIO, RATIO_FORMATS = "exp_avg_ratio", {"exp_avg_ratio": "int4"}


def _rows_of(shape: torch.Size, cols: int) -> tuple[int, ...]:
    """Return the shape of what has so many columns for each row of a parameter's matrix."""
    leading = shape[:-1] if matrix_shape(shape)[0] == math.prod(shape[:-1]) else shape[:1]
    return (*leading, cols)


_Parts = dict[str, Callable[[torch.Size], tuple[int, ...]]]
"""The parts of a moment, with the function of their shape for a parameter's."""

_PARTS: _Parts = {
    "codes": tuple,
    "scale": lambda shape: _rows_of(shape, num_groups(matrix_shape(shape)[1])),
}
_RATIO_PARTS: _Parts = {
    "codes": lambda shape: _rows_of(shape, matrix_shape(shape)[1] // 2),
    "scale": lambda shape: _rows_of(shape, matrix_shape(shape)[1] // GROUP),
}
_RATIO = RATIO, _RATIO_PARTS


def shards_rows(parameter: Tensor) -> bool:
    """Return whether a rank has whole rows of a parameter."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return all(getattr(placement, "dim", 0) == 0 for placement in placements)


def encoded_entry(
    name: str, moment: QuantizedState, parameter: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Return codes and scales of a moment, of this rank's part, under their names.

    Args:
        name: the name of the moment.
        moment: this rank's part.
        parameter: sharded by rows, or not.
        device: where what is returned shall be.
    """
    entry = {}
    key, parts = _RATIO if isinstance(moment, RatioMoment) else (name, _PARTS)
    for (part, of), stored in zip(parts.items(), moment.codes[: len(parts)], strict=True):
        data = stored.view(of(moment.shape)).to(device, copy=True)
        entry[f"{key}_{part}"] = with_data(parameter, data, of(parameter.shape))
    return entry


def is_encoded(name: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has the codes of a moment."""
    return f"{name}_codes" in entry or (name == "exp_avg" and is_ratio(entry))


def is_ratio(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has the codes of a first moment in 4 bits."""
    return f"{RATIO}_codes" in entry


def codes_of(name: str, entry: Mapping[str, Any]) -> Tensor:
    """Return the codes of a moment."""
    key, _ = _form(name, entry)
    codes: Tensor = entry[f"{key}_codes"]
    return codes


def restore(name: str, entry: Mapping[str, Any], moment: QuantizedState) -> None:
    """Give a moment the codes and scales of an entry in its form."""
    key, parts = _RATIO if isinstance(moment, RatioMoment) else (name, _PARTS)
    for part, target in zip(parts, moment.codes[: len(parts)], strict=True):
        target.copy_(local(entry[f"{key}_{part}"]).reshape(target.shape))


def decoded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry whose moments are float32, in torch.optim.AdamW's format."""
    plain, second = dict(entry), None
    for name in reversed(MOMENT_FORMATS):
        if not is_encoded(name, entry):
            continue
        key, parts = _form(name, entry)
        codes, scale = (local(plain.pop(f"{key}_{part}")) for part in parts)
        if key == RATIO:
            assert second is not None
            rows = len(second.qdata)
            ratio = RatioInt4(codes.reshape(rows, -1), scale.reshape(rows, -1), *second.codes)
            moment: QuantizedState = RatioMoment(ratio, second.shape)
        else:
            like = entry[f"{name}_codes"]
            rows, cols = matrix_shape(codes.shape)
            stored = BlockScaled(codes.reshape(rows, cols), scale.reshape(rows, -1))
            moment = second = Float8Moment(stored, codes.shape, MOMENT_FORMATS[name])
        plain[name] = with_data(like, moment.dequantize(), tuple(like.shape))
    return plain


def misfit(name: str, entry: Mapping[str, Any], parameter: Tensor) -> str | None:
    """Explain why codes and scales of an entry are none of a parameter; None: they are."""
    key, parts = _form(name, entry)
    dtype = torch.uint8
    if key == RATIO:
        dtype = torch.int8
        if not is_encoded("exp_avg_sq", entry):
            return f"[{key + '_codes'!r}] is a ratio to 'exp_avg_sq_codes', which are missing"
        if matrix_shape(parameter.shape)[1] % COLUMNS:
            return f"[{key + '_codes'!r}] needs a row length that is a multiple of {COLUMNS}"
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
    """Return the first part of a moment's names in an entry, and its parts."""
    return _RATIO if name == "exp_avg" and is_ratio(entry) else (name, _PARTS)
