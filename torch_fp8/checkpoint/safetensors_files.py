"""Checkpoints in the safetensors format, read one tensor at a time and written file by file.

A checkpoint is one file, or several with an index, ``<name>.index.json``, whose ``weight_map``
names the file of each key. The safetensors library reads and writes them. A tensor that is read is
copied into its own memory, because a mapped file would keep pages of tensors that are no longer
needed. Files are named and filled as by transformers' ``save_pretrained``.

`QuantizedFiles`: a checkpoint whose FP8 weights are read together with their scales.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_fp8.checkpoint.formats import read_format
from torch_fp8.checkpoint.whole_folder import check_space
from torch_fp8.tensor.frozen_payload import FP8Weight, scale_grid


class SafetensorsFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint by key; each access reads the tensor from its file again.

    Args:
        path: a folder with ``*.safetensors`` files, as ``save_pretrained`` writes it, or one file.
    Attributes:
        stored: the tensors on the meta device, by key.
    Raises:
        ValueError: the file does not exist; a header or an index cannot be read (the error has its
            path); a shard in the index is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.stored: dict[str, Tensor] = {}
        self._places: dict[str, Path] = {}
        for file in _files(self.path):
            with _opened(file) as opened:
                tensors = {key: opened.get_tensor(key).to("meta") for key in opened.keys()}  # noqa: SIM118
            self.stored |= tensors
            self._places |= dict.fromkeys(tensors, file)

    def __getitem__(self, key: str) -> Tensor:
        with _opened(self._places[key]) as file:
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


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file with the safetensors library."""
    safetensors = _library("safetensors", f"reading {file}")
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            yield opened
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error


def _library(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs safetensors: pip install safetensors") from error


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


def write_safetensors(folder: Path, groups: Sequence[Any], max_shard_size: int) -> dict[str, int]:
    """Write a checkpoint: ``model.safetensors``, or several files and their index.

    Args:
        folder: an existing folder.
        groups: `torch_fp8.checkpoint.export_plan.FoldedTensor` objects, whose tensors are computed
            together and stored in one file, in the order in which they are computed.
        max_shard_size: the maximum bytes of tensors in one file; a larger group gets its own file.
    Returns:
        The bytes of each group's tensors, by the group's key.
    Raises:
        OSError: the disk is too small, or becomes full.
        ImportError: safetensors is missing.
    """
    library = _library("safetensors.torch", f"writing {folder}")
    check_space(folder, sum(group.tensor.numel() for group in groups))  # a byte each, or more
    sizes: dict[str, int] = {}
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}

    def save() -> None:
        file = folder / f"{len(shards)}.safetensors"
        library.save_file(shard, file, metadata={"format": "pt"})
        shards.append([*shard])
        shard.clear()

    size = 0
    for group in groups:
        tensors = {name: _on_cpu(value) for name, value in group.tensors()}
        sizes[group.key] = sum(tensor.nbytes for tensor in tensors.values())
        if shard and size + sizes[group.key] > max_shard_size:
            save()
            size = 0
        shard.update(tensors)
        size += sizes[group.key]
        del tensors
    save()
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(names) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)
    for i, name in enumerate(names):
        (folder / f"{i}.safetensors").rename(folder / name)
    return sizes


def _on_cpu(value: Tensor) -> Tensor:
    """Return a copy with its own memory, because the library refuses tensors that share theirs."""
    copy = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
    return copy.copy_(value.detach())


_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)


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
        return tuple(self.stored[key].shape)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which a tensor is used: BF16 for FP8 weights."""
        return torch.bfloat16 if key in self.fp8 else self.stored[key].dtype

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
        codes = torch.float8_e4m3fn, torch.float8_e5m2
        for key, tensor in self.stored.items():
            if self.format is None and tensor.dtype in codes:
                raise ValueError(
                    f"{key!r} in {str(self.path)!r} holds FP8 codes, but there is no config.json "
                    "beside it with a quantization_config that describes their scales; copy the "
                    "config.json that was exported with it. Nothing was loaded"
                )
            if tensor.dtype == torch.float8_e5m2:
                raise self._broken(f"{key!r} is E5M2; weights must be E4M3")
        if self.format is None:
            return
        for key, weight in self.stored.items():
            if key.endswith(f".weight{self.format.scale_suffix}"):
                owner = self.stored.get(key.removesuffix(self.format.scale_suffix))
                if owner is None or owner.dtype != torch.float8_e4m3fn:
                    raise self._broken(f"{key!r} has no E4M3 weight beside it")
            if weight.dtype == torch.float8_e4m3fn:
                scale_key = f"{key}{self.format.scale_suffix}"
                yield key, (scale_key, self._checked_block(key, scale_key))

    def _checked_block(self, key: str, scale_key: str) -> tuple[int, int]:
        assert self.format is not None
        if scale_key not in self.stored:
            raise self._broken(f"{scale_key!r}, the scales of {key!r}, is missing")
        shape, scale = self.shape(key), self.stored[scale_key]
        grid = self.shape(scale_key)
        if len(shape) != 2:
            raise self._broken(f"{key!r} has shape {shape}; FP8 weights must be matrices")
        block = self.format.block_of(shape, grid)
        if block is None:
            declared = " or ".join(f"{r or 'all'} x {c or 'all'}" for r, c in self.format.blocks)
            raise self._broken(
                f"{scale_key!r} has shape {grid}, which does not match a weight {shape} in "
                f"blocks of {declared}"
            )
        if scale.dtype not in (*_FLOATS, *[torch.uint8] * self.format.ue8m0):
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
