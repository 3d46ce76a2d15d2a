"""Checkpoints in the safetensors format, read one tensor at a time and written file by file.

A checkpoint is one file, or several with an index, ``<name>.index.json``, whose ``weight_map``
names the file of each key. The safetensors library reads and writes them. A tensor that is read is
copied into its own memory, because a mapped file would keep pages of tensors that are no longer
needed. Files are named and filled as by transformers' ``save_pretrained``.

`whole_folder` writes a folder completely or not at all: to a temporary folder, which the process
locks. If a process is killed, the folder remains without a lock, and the next write to the same
place removes it.
"""

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class SafetensorsFiles:
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


def folder_of(config: Any) -> Path | None:
    """Return the local folder that a host's model was loaded from, or None if there is none."""
    name = getattr(config, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    hub = sys.modules.get("huggingface_hub")  # imported if the model came from the hub
    if hub is None or Path(name).is_absolute():
        return None
    revision = getattr(config, "_commit_hash", None)
    try:
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a name on the hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None


_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*", "*processor_config.json"),
)
"""The file names of all kinds of tokenizers and processors of transformers."""


def copy_tokenizer(source: Path | None, folder: Path) -> None:
    """Copy the tokenizer files, and a model's own code, if there are any."""
    if source is None:
        return
    for pattern in (*_TOKENIZER, "*.py"):
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


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


def write_safetensors(
    folder: Path,
    planned: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_size: int,
) -> None:
    """Write a checkpoint: ``model.safetensors``, or several files and their index.

    Args:
        folder: an existing folder.
        planned: the tensors on the meta device by name, in the order in which they come.
        tensors: their (name, tensor) pairs; those of one file exist at a time.
        max_shard_size: the maximum bytes of tensors in one file; a larger tensor gets its own file.
    Raises:
        OSError: the disk is too small, or becomes full.
        ImportError: safetensors is missing.
    """
    library = _library("safetensors.torch", f"writing {folder}")
    total = sum(tensor.nbytes for tensor in planned.values())
    check_space(folder, total)
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in planned.items():
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(names) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)
    remaining = iter(tensors)
    for name, keys in zip(names, shards, strict=True):
        shard = {key: _on_cpu(value) for key, value in islice(remaining, len(keys))}
        assert [*shard] == keys, "the tensors are not those of the plan"
        library.save_file(shard, folder / name, metadata={"format": "pt"})
        del shard


def _on_cpu(value: Tensor) -> Tensor:
    """Return a copy with its own memory, because the library refuses tensors that share theirs."""
    copy = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
    return copy.copy_(value.detach())


def refuse_existing(path: str | Path) -> Path:
    """Return `path` if a folder can be created there.

    Raises:
        ValueError: `path` exists, or its parent does not.
    """
    path = Path(path).absolute()
    if path.exists() or path.is_symlink():
        raise ValueError(
            f"{str(path)!r} already exists; choose a folder that does not. Nothing was written"
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"{str(path.parent)!r} is not a folder; create it first. Nothing was written"
        )
    return path


@contextlib.contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, renamed to `path` after the block succeeds.

    If the block raises an exception, the temporary folder is removed.

    Raises:
        ValueError: see `refuse_existing`.
        OSError: the files cannot be written; if the disk is full, the message says so, with the
            path.
    """
    path = refuse_existing(path)
    with _temporary(path.parent, f".{path.name}.") as partial:
        try:
            yield partial
            for file in partial.iterdir():
                _sync(file)
            _sync(partial)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            why = error.strerror or os.strerror(error.errno)
            raise OSError(error.errno, f"{why}; nothing was written", str(path)) from error
        os.rename(partial, path)
    _sync(path.parent)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, renamed to `path` at the end or removed on error.

    A link stays, and its target is replaced.
    """
    path = path.resolve()
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    partial.touch()  # an OSError names the cause better than some of the callers' writers
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _temporary(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder, which is removed afterwards if it still exists.

    Folders with the same prefix that killed processes have left are removed first.
    """
    for old in parent.glob(f"{glob.escape(prefix)}*.partial"):
        with _lock(old) as is_ours:
            if is_ours:
                shutil.rmtree(old, ignore_errors=True)
    folder = parent / f"{prefix}{uuid.uuid4().hex}.partial"
    folder.mkdir()
    try:
        with _lock(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Lock a folder and yield whether that worked; the lock ends with the process."""
    opened, is_ours = None, False
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
    try:
        yield is_ours
    finally:
        if opened is not None:
            os.close(opened)


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse to start a write that cannot fit.

    Raises:
        OSError: the disk of `folder` does not have that many free bytes.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        what = f"{os.strerror(errno.ENOSPC)}: {num_bytes} bytes are needed and {free} are free"
        raise OSError(errno.ENOSPC, what)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk now."""
    if path.is_dir() and os.name == "nt":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
