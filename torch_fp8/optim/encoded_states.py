"""Moments in a checkpoint as they are in memory: codes and scales, 1.03 bytes each.

A moment of shape (..., K), say ``exp_avg``, is two tensors beside ``step``::

    exp_avg_codes   (..., K) uint8
    exp_avg_scale   (..., ceil(K / 32)) uint8, of groups along the last dimension

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
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.float8_moment import MOMENT_FORMATS, Float8Moment

FORMATS_KEY = "moment_formats"
"""The option of a checkpoint that names the formats of its codes."""
STATE_FORMATS = {name: format.name for name, format in MOMENT_FORMATS.items()}


def _scale_shape(shape: torch.Size) -> tuple[int, ...]:
    rows, cols = matrix_shape(shape)
    leading = shape[:-1] if rows == math.prod(shape[:-1]) else shape[:1]
    return (*leading, num_groups(cols))


_PARTS: dict[str, Callable[[torch.Size], tuple[int, ...]]] = {"codes": tuple, "scale": _scale_shape}
"""The parts of a moment, with the function of their shape for a parameter's."""


def shards_rows(parameter: Tensor) -> bool:
    """Return whether a rank has whole rows of a parameter."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return all(getattr(placement, "dim", 0) == 0 for placement in placements)


def encoded_entry(
    name: str, moment: Float8Moment, parameter: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Return codes and scales of a moment, of this rank's part, under their names.

    Args:
        name: the name of the moment.
        moment: this rank's part.
        parameter: sharded by rows, or not.
        device: where what is returned shall be.
    """
    entry = {}
    for (part, of), stored in zip(_PARTS.items(), moment.codes, strict=True):
        data = stored.view(of(moment.shape)).to(device, copy=True)
        entry[f"{name}_{part}"] = with_data(parameter, data, of(parameter.shape))
    return entry


def is_encoded(name: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has the codes of a moment."""
    return f"{name}_codes" in entry


def restore(name: str, entry: Mapping[str, Any], moment: Float8Moment) -> None:
    """Give a moment the codes and scales of an entry."""
    for part, target in zip(_PARTS, moment.codes, strict=True):
        target.copy_(local(entry[f"{name}_{part}"]).reshape(target.shape))


def decoded(entry: Mapping[str, Any], names: Any = MOMENT_FORMATS) -> dict[str, Any]:
    """Return an entry whose moments are float32, in torch.optim.AdamW's format."""
    plain = dict(entry)
    for name in names:
        if not is_encoded(name, entry):
            continue
        codes, scale = (plain.pop(f"{name}_{part}") for part in _PARTS)
        shard = local(codes)
        rows, cols = matrix_shape(shard.shape)
        stored = BlockScaled(shard.reshape(rows, cols), local(scale).reshape(rows, -1))
        value = Float8Moment(stored, shard.shape, MOMENT_FORMATS[name]).dequantize()
        plain[name] = with_data(codes, value, tuple(codes.shape))
    return plain


def misfit(name: str, entry: Mapping[str, Any], parameter: Tensor) -> str | None:
    """Explain why codes and scales of an entry are none of a parameter; None: they are."""
    for part, of in _PARTS.items():
        key = f"{name}_{part}"
        value = entry.get(key)
        if not isinstance(value, Tensor) or value.dtype != torch.uint8:
            return f"[{key!r}] is no uint8 tensor: {value!r:.80}"
        fits = [of(parameter.shape), of(local(parameter).shape)]
        if tuple(value.shape) not in fits:
            return f"[{key!r}] has shape {tuple(value.shape)}, expected {fits[0]}"
    return None
