"""Checkpoints in the safetensors format, written one tensor at a time.

Names, dtypes and shapes are planned first, because the header depends on them. Each tensor is then
computed, written to its place and freed before the next one. Files are named and filled as by
transformers' ``save_pretrained``. Within a file larger dtypes come first, so each tensor starts at
a multiple of its element size.
"""

import ctypes
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fp8.checkpoint.safetensors_files import DTYPES
from torch_fp8.checkpoint.whole_folder import check_space

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class PlannedTensor(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorGroup(NamedTuple):
    """Tensors that are computed together and stored in one file.

    Attributes:
        tensors: the planned tensors.
        make: a function that computes them in this order, on any device.
    """

    tensors: tuple[PlannedTensor, ...]
    make: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors of the group."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def parse_size(size: int | str) -> int:
    """Return a number of bytes; accepts a number, ``"5GB"`` (1000s) or ``"5GiB"`` (1024s).

    Raises:
        ValueError: the size has another form, or is not positive.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise ValueError(f"max_shard_size={size!r} is not a size; use a number of bytes, or '5GB'")
    return int(match[1]) * unit


def write_safetensors(folder: Path, groups: Sequence[TensorGroup], max_shard_size: int) -> None:
    """Write a checkpoint: ``model.safetensors``, or several files and their index.

    Args:
        folder: an existing folder.
        groups: the tensor groups, in the order in which they are computed.
        max_shard_size: the maximum bytes of tensors in one file; a larger group gets its own file.
    Raises:
        OSError: the disk is too small, or becomes full.
        ValueError: a group's tensors differ from its plan.
    """
    check_space(folder, sum(group.num_bytes for group in groups))
    shards = list(_shards(groups, max_shard_size))
    weight_map = {}
    for i, shard in enumerate(shards):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard)
        weight_map.update({tensor.name: name for group in shard for tensor in group.tensors})
    if len(shards) > 1:
        total = sum(group.num_bytes for group in groups)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def _shards(groups: Sequence[TensorGroup], most: int) -> Iterator[list[TensorGroup]]:
    shard: list[TensorGroup] = []
    size = 0
    for group in groups:
        if shard and size + group.num_bytes > most:
            yield shard
            shard, size = [], 0
        shard.append(group)
        size += group.num_bytes
    yield shard


def _write_file(path: Path, groups: Sequence[TensorGroup]) -> None:
    planned = [tensor for group in groups for tensor in group.tensors]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for tensor in sorted(planned, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name)):
        places[tensor.name] = end
        offsets = [end, end + tensor.num_bytes]
        end = offsets[1]
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        start = file.tell()
        file.truncate(start + end)
        for group in groups:
            for tensor, value in zip(group.tensors, group.make(), strict=True):
                if value.dtype != tensor.dtype or tuple(value.shape) != tensor.shape:
                    raise ValueError(
                        f"{tensor.name!r} should be {tensor.dtype} {tensor.shape} but is "
                        f"{value.dtype} {tuple(value.shape)}; nothing was written"
                    )
                file.seek(start + places[tensor.name])
                _write_bytes(file, value)


def _write_bytes(file: object, value: Tensor) -> None:
    value = value.detach().contiguous().cpu()
    num_bytes = value.numel() * value.element_size()
    if num_bytes:
        memory = (ctypes.c_ubyte * num_bytes).from_address(value.data_ptr())
        file.write(memory)  # type: ignore[attr-defined]
