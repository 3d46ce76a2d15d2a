"""Checkpoints in the safetensors format, read and written one tensor at a time.

A file is eight bytes with the length of a JSON header (little-endian), the header, which has the
dtype, shape and place of each key, and the bytes of all tensors
(https://github.com/huggingface/safetensors). A checkpoint is one file, or several with an index,
``<name>.index.json``, whose ``weight_map`` names the file of each key. The safetensors library
reads them; a tensor is copied into its own memory, because a mapped file would keep pages of
tensors that are no longer needed.

Before a checkpoint is written, names, dtypes and shapes are planned on the meta device, because the
header depends on them. Each tensor is then computed, written to its place and freed before the next
one. Files are named and filled as by transformers' ``save_pretrained``. Within a file larger dtypes
come first, so each tensor starts at a multiple of its element size.

`QuantizedFiles`: a checkpoint whose FP8 weights are read together with their scales.
"""

import ctypes
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.checkpoint.formats import read_format
from torch_fp8.checkpoint.whole_folder import check_space
from torch_fp8.tensor.frozen_payload import FP8Weight, scale_grid

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredTensor(NamedTuple):
    """The place of one tensor in a file.

    Attributes:
        file: the path of the file.
        dtype: the format's name of the dtype, for example ``"F8_E4M3"``.
        shape: the shape.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


class SafetensorsFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint by key; each access reads the tensor from its file again.

    Args:
        path: a folder with ``*.safetensors`` files, as ``save_pretrained`` writes it, or one file.
    Raises:
        ValueError: the file does not exist; a header or an index cannot be read (the error has its
            path); a shard in the index is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.stored: dict[str, StoredTensor] = {}
        for file in _files(self.path):
            self.stored.update(_header(file))

    def __getitem__(self, key: str) -> Tensor:
        stored = self.stored[key]
        if stored.dtype not in DTYPES:
            raise ValueError(
                f"{key!r} in {stored.file} has dtype {stored.dtype}, which is not supported"
            )
        with _opened(stored.file) as file:
            return file.get_tensor(key).clone()  # the tensor in the file keeps it mapped

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _files(path: Path) -> list[Path]:
    """Return the files of a checkpoint: those in its index, if it has one."""
    if path.is_file():
        return [path]
    indices = sorted(path.glob("*.safetensors.index.json"))
    if indices:
        try:
            names = sorted(set(json.loads(indices[0].read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{indices[0]} is not an index of safetensors files: {error}"
            ) from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ValueError(f"{indices[0]} names {missing[0]!r}, which does not exist")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    whole = [file for file in files if file.name == "model.safetensors"]
    if not files:
        raise ValueError(
            f"{str(path)!r} has no *.safetensors file; pass a local checkpoint folder "
            "(huggingface_hub.snapshot_download returns the folder of a model on the hub)"
        )
    return whole or files


def _header(file: Path) -> dict[str, StoredTensor]:
    with _opened(file) as opened:
        parts = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return {
            key: StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
            for key, part in parts.items()
        }


def _opened(file: Path) -> Any:
    """Open a file with the safetensors library."""
    try:
        safetensors = import_module("safetensors")
    except ImportError as error:
        raise ImportError(f"reading {file} needs safetensors: pip install safetensors") from error
    try:
        return safetensors.safe_open(file, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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


def write_safetensors(folder: Path, groups: Sequence[Any], max_shard_size: int) -> None:
    """Write a checkpoint: ``model.safetensors``, or several files and their index.

    Args:
        folder: an existing folder.
        groups: `torch_fp8.checkpoint.export_plan.FoldedTensor` objects, whose tensors are computed
            together and stored in one file, in the order in which they are computed.
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
        weight_map.update({key: name for group in shard for key in group.planned})
    if len(shards) > 1:
        total = sum(group.num_bytes for group in groups)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def _shards(groups: Sequence[Any], most: int) -> Iterator[list[Any]]:
    shard: list[Any] = []
    size = 0
    for group in groups:
        if shard and size + group.num_bytes > most:
            yield shard
            shard, size = [], 0
        shard.append(group)
        size += group.num_bytes
    yield shard


def _write_file(path: Path, groups: Sequence[Any]) -> None:
    planned = {name: tensor for group in groups for name, tensor in group.planned.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, tensor in sorted(planned.items(), key=lambda item: (-item[1].itemsize, item[0])):
        places[name] = end
        offsets = [end, end + tensor.nbytes]
        end = offsets[1]
        header[name] = {
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
        for name, value in (pair for group in groups for pair in group.tensors()):
            plan = planned[name]
            if value.dtype != plan.dtype or value.shape != plan.shape:
                raise ValueError(
                    f"{name!r} should be {plan.dtype} {tuple(plan.shape)} but is "
                    f"{value.dtype} {tuple(value.shape)}; nothing was written"
                )
            file.seek(start + places[name])
            _write_bytes(file, value)


def _write_bytes(file: object, value: Tensor) -> None:
    value = value.detach().contiguous().cpu()
    num_bytes = value.numel() * value.element_size()
    if num_bytes:
        memory = (ctypes.c_ubyte * num_bytes).from_address(value.data_ptr())
        file.write(memory)  # type: ignore[attr-defined]


_E4M3 = "F8_E4M3"
_FLOATS = ("F32", "F16", "BF16", "F8_E8M0")


class QuantizedFiles(SafetensorsFiles):
    """The tensors of a checkpoint in 16 or 32 bits, or in one of the FP8 formats.

    The keys are those of weights and other tensors, without scales and other companions of weights.

    Args:
        path: see `SafetensorsFiles`.
    Attributes:
        format: the FP8 format, or None if the configuration names no quantization.
        fp8: the key of its scales and the block that shares one, for the key of each FP8 weight.
    Raises:
        ValueError: see `SafetensorsFiles` and `torch_fp8.checkpoint.formats.read_format`; an FP8
            weight has no scales; scales have no FP8 weight; scales have another shape or dtype, or
            are not finite, zero or negative (the error names the key); there are FP8 weights, but
            no configuration explains their scales.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.format = read_format(self.path)
        self.fp8 = dict(self._checked())

    def __iter__(self) -> Iterator[str]:
        scales = {key for key, _ in self.fp8.values()}
        others = () if self.format is None else ("activation_scale", "input_scale")
        return (key for key in self.stored if key not in scales and not key.endswith(others))

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.stored[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which a tensor is used: BF16 for FP8 weights."""
        return torch.bfloat16 if key in self.fp8 else DTYPES[self.stored[key].dtype]

    def read(self, key: str) -> Tensor | FP8Weight:
        """Read a tensor, or an FP8 weight with its scales."""
        if key not in self.fp8:
            return self[key]
        return FP8Weight(self[key], self.scale(key), self.fp8[key][1])

    def scale(self, key: str) -> Tensor:
        """Read the scales of an FP8 weight as a float32 grid, from any stored dtype."""
        scale_key, block = self.fp8[key]
        return _float32(self[scale_key]).reshape(scale_grid(self.shape(key), block))

    def _checked(self) -> Iterator[tuple[str, tuple[str, tuple[int, int]]]]:
        """Check all scales before anything is loaded, and yield the entries of `fp8`."""
        if self.format is None:
            for key, tensor in self.stored.items():
                if tensor.dtype in (_E4M3, "F8_E5M2"):
                    raise ValueError(
                        f"{key!r} in {str(self.path)!r} holds FP8 codes, but there is no "
                        "config.json beside it with a quantization_config that describes their "
                        "scales; copy the config.json that was exported with it. Nothing was loaded"
                    )
            return
        for key, tensor in self.stored.items():
            if tensor.dtype == "F8_E5M2":
                raise self._broken(f"{key!r} is E5M2; weights must be E4M3")
        for key, weight in self.stored.items():
            if key.endswith(f".weight{self.format.scale_suffix}"):
                owner = self.stored.get(key.removesuffix(self.format.scale_suffix))
                if owner is None or owner.dtype != _E4M3:
                    raise self._broken(f"{key!r} has no E4M3 weight beside it")
            if weight.dtype == _E4M3:
                scale_key = f"{key}{self.format.scale_suffix}"
                yield key, (scale_key, self._checked_block(key, scale_key))

    def _checked_block(self, key: str, scale_key: str) -> tuple[int, int]:
        assert self.format is not None
        if scale_key not in self.stored:
            raise self._broken(f"{scale_key!r}, the scales of {key!r}, is missing")
        shape, scale = self.shape(key), self.stored[scale_key]
        if len(shape) != 2:
            raise self._broken(f"{key!r} has shape {shape}; FP8 weights must be matrices")
        block = self.format.block_of(shape, scale.shape)
        if block is None:
            declared = " or ".join(f"{r or 'all'} x {c or 'all'}" for r, c in self.format.blocks)
            raise self._broken(
                f"{scale_key!r} has shape {scale.shape}, which does not match a weight {shape} in "
                f"blocks of {declared}"
            )
        if scale.dtype not in (*_FLOATS, *(["U8"] if self.format.ue8m0 else [])):
            raise self._broken(f"{scale_key!r} has dtype {scale.dtype}; scales must be floats")
        value = _float32(self[scale_key])
        if not bool(value.isfinite().all()):
            raise self._broken(f"{scale_key!r} holds an Inf or NaN")
        if not bool((value > 0).all()):
            raise self._broken(f"{scale_key!r} holds a scale of zero or below")
        return block

    def _broken(self, what: str) -> ValueError:
        assert self.format is not None
        return ValueError(
            f"{what}: {str(self.path)!r} is not a complete {self.format.name} checkpoint; nothing "
            "was loaded"
        )


def _float32(scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)
