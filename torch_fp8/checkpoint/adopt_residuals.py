"""Support for older checkpoints of sharded models, with BF16 weights and residuals in the
optimizer's state.

Older checkpoints had the BF16 half of each weight under the model's keys, and its residual as
``<optimizer>.state.<fqn>.residual``. Weights now are float32, so loading reads only the BF16
halves. `adopt_residuals` then reads the residuals and joins them.
"""

import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from torch_fp8.optim.checkpoint import has_residual
from torch_fp8.optim.residual import residual_shape, shard_of, sharded_residual_shape
from torch_fp8.optim.state import SMALL_RESIDUAL_BITS, is_large
from torch_fp8.quantization.split_float import RESIDUAL_BITS
from torch_fp8.quantization.wording import counted
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.halves import EXACT_BITS, join_matrix, split_matrix

_RESIDUAL = re.compile(r"(?:^|\.)state\.(.+)\.residual$")
_LOW_HALF = 0xFFFF


@torch.no_grad()
def adopt_residuals(path: str | Path, model: nn.Module, weights_only: bool = True) -> int:
    """Join a model's float32 weights with the residuals that an older checkpoint has of them.

    All ranks call it after the model was loaded from the checkpoint. A checkpoint without residuals
    in the optimizer's state changes nothing. A warning names weights whose residual does not fit.

    Args:
        path: a folder written by torch.distributed.checkpoint, a file with the whole state of an
            optimizer, or a folder that contains these, as Accelerate's.
        model: the model whose weights were loaded, sharded or not.
        weights_only: the argument of ``torch.load``.
    Returns:
        The number of joined weights.
    """
    weights = {
        name: value
        for name, value in get_model_state_dict(model).items()
        if isinstance(value, Tensor) and value.dtype == torch.float32 and value.ndim
    }
    joined: set[str] = set()
    refused: set[str] = set()
    names = [name for name, _ in model.named_parameters()]
    for name, residual in _read(Path(path), weights, names, weights_only):
        fits = residual is not None and _join(weights[name], *residual)
        (joined if fits else refused).add(name)
    if refused:
        warnings.warn(
            f"FP8: {path} has residuals for {counted(len(refused), 'weight')} that do not match "
            f"the loaded values, such as {min(refused)!r}: these weights are left unchanged",
            stacklevel=2,
        )
    return len(joined)


def _read(
    path: Path, weights: Mapping[str, Tensor], names: Sequence[str], weights_only: bool
) -> Iterator[tuple[str, tuple[Tensor, int] | None]]:
    """Yield weights' names with this rank's part of the residual and its bits, or None."""
    files = [path] if path.is_file() else sorted(path.glob("optimizer*.bin"))
    for file in filter(zipfile.is_zipfile, files):  # torch.save writes zip files
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)
        for key, entry in _entries(saved):
            name = names[key] if isinstance(key, int) and key < len(names) else key
            if name in weights and has_residual(entry):
                bits = _bits(weights[name], entry["residual"].shape)
                whole = None if bits is None else shard_of(weights[name], entry["residual"])
                yield name, None if whole is None or bits is None else (local(whole), bits)
    for part in [path, *sorted(path.glob("*"))] if path.is_dir() else []:
        if (part / ".metadata").is_file():
            yield from _read_shards(part, weights)


def _entries(saved: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield (name or number of the parameter, state) for all optimizers in a file."""
    values = [saved, *saved.values()] if isinstance(saved, dict) else []
    values += [part for value in values if isinstance(value, list) for part in value]
    for value in values:
        if isinstance(value, dict) and "param_groups" in value:
            yield from value.get("state", {}).items()


def _read_shards(
    folder: Path, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[Tensor, int] | None]]:
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    key_of_weight = {match[1]: key for key in entries if (match := _RESIDUAL.search(key))}
    bits: dict[str, int | None] = {}
    wanted: dict[str, Any] = {}
    for name, key in key_of_weight.items():
        if name in weights:
            bits[name] = k = _bits(weights[name], getattr(entries[key], "size", None))
            if k is not None:
                wanted[key] = _empty(weights[name], k)
    if wanted:
        dcp.load(dict(wanted), storage_reader=reader)
    for name, k in bits.items():
        yield name, None if k is None else (local(wanted[key_of_weight[name]]), k)


def _bits(weight: Tensor, shape: torch.Size | None) -> int | None:
    """Return the number of bits of a saved residual; None if the weight has another shape."""
    choices = [k for k in RESIDUAL_BITS if k] if is_large(weight) else [SMALL_RESIDUAL_BITS]
    of_matrix = {k: residual_shape(weight.shape, k) for k in choices}
    fits = {k: (of_matrix[k], _saved_shape(weight, k)) for k in choices}
    return next((k for k in choices if shape in fits[k]), None)


def _saved_shape(weight: Tensor, bits: int) -> tuple[int, int]:
    return sharded_residual_shape(weight, residual_shape(weight.shape, bits), bits)


def _empty(weight: Tensor, bits: int) -> Tensor:
    """Return memory for a residual in its saved shape, sharded as its weight is."""
    shape, shard = _saved_shape(weight, bits), local(weight)
    rows = shard.shape[0]
    part = shard.numel() * shape[0], weight.numel() * rows  # fewer than a whole row's columns
    cols = shape[1] * part[0] // part[1] if rows else shape[1]
    empty = torch.zeros(rows, cols, dtype=torch.int8, device=shard.device)
    return with_data(weight, empty, shape)


def _join(weight: Tensor, saved: Tensor, bits: int) -> bool:
    """Join this rank's part of a weight; return False if the weight already has bits below BF16."""
    shard = local(weight)
    values = plain(shard).contiguous()
    if not values.numel():
        return True
    stored = saved.contiguous().view(torch.int16 if bits == EXACT_BITS else torch.int8)
    stored = stored.view(residual_shape(shard.shape, bits))
    high, _ = split_matrix(values, EXACT_BITS)
    joined = join_matrix(high, stored, bits)
    if not bool((values.view(torch.int32) & _LOW_HALF).any()):
        shard.copy_(joined)
        return True
    return torch.equal(joined, values)
