"""Checkpoints in the safetensors format, read one tensor at a time.

A file is eight bytes with the length of a JSON header (little-endian), the header, which has the
dtype, shape and place of each key, and the bytes of all tensors
(https://github.com/huggingface/safetensors). A checkpoint is one file, or several with an index,
``<name>.index.json``, whose ``weight_map`` names the file of each key. A tensor is read into its
own memory; a mapped file would keep pages of tensors that are no longer needed.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
_MAX_HEADER = 100_000_000  # bytes; the limit of the format


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor in a file.

    Attributes:
        file: the path of the file.
        dtype: the format's name of the dtype, for example ``"F8_E4M3"``.
        shape: the shape.
        start: the offset of its first byte in the file.
        num_bytes: the number of its bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


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
        dtype = DTYPES[stored.dtype]
        if not stored.num_bytes:
            return torch.empty(stored.shape, device="cpu", dtype=dtype)
        buffer = bytearray(stored.num_bytes)
        with stored.file.open("rb") as opened:
            opened.seek(stored.start)
            if opened.readinto(buffer) != stored.num_bytes:
                raise ValueError(f"{stored.file} ends within {key!r}; was it copied completely?")
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(stored.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


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
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(size - 8, _MAX_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            entries: dict[str, Any] = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        stored = {key: _stored(file, 8 + length, size, entry) for key, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    return stored


def _stored(file: Path, data: int, size: int, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    dtype = DTYPES.get(entry["dtype"])
    wrong = dtype is not None and end - begin != math.prod(shape) * dtype.itemsize
    if wrong or not 0 <= begin <= end <= size - data:
        raise ValueError(f"a tensor of {entry['dtype']} {shape} lies at bytes {begin} to {end}")
    return StoredTensor(file, entry["dtype"], shape, data + begin, end - begin)
