"""`whole_folder`: a folder that is there with everything in it, or not at all.

Files are written into a folder of another name, which its process locks. Where a process was killed
that folder stays, without a lock, and whoever next writes to the same place removes it.
"""

import contextlib
import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_CONFIG = "config.json"


def refuse_existing(path: str | Path) -> Path:
    """Return `path` if a folder can be made there.

    Raises:
        ValueError: something is there already, or the folder above it is not.
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
    """Yield a temporary folder beside `path`, which takes that name when the block has succeeded.

    If the block raises, whatever it was, the temporary folder is removed and nothing is left.

    Raises:
        ValueError: see `refuse_existing`.
        OSError: the files cannot be written; of a full disk the message says so, with the path.
    """
    path = refuse_existing(path)
    with _temporary(path.parent, f".{path.name}.") as partial:
        with _naming_full_disks(path):
            yield partial
            partial.chmod(0o777 & ~_umask())
            for file in partial.iterdir():
                _sync(file)
            _sync(partial)
        os.rename(partial, path)
    _sync(path.parent)


@contextlib.contextmanager
def replaced_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder, whose files then replace those of the same name in `folder`.

    None is replaced before the block has succeeded, and each in one step. Between the first and the
    last the folder has no ``config.json``, so that nobody who is stopped there leaves a mixture of
    two saves that could be loaded. What else describes or holds weights of an earlier save is
    removed.

    Args:
        folder: is made if it does not exist.
    Raises:
        OSError: the files cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _temporary(folder, ".export.") as partial:
        with _naming_full_disks(folder):
            yield partial
            for file in partial.iterdir():
                _sync(file)
        names = sorted(file.name for file in partial.iterdir())
        (folder / _CONFIG).unlink(missing_ok=True)
        _sync(folder)
        for name in names:
            if name != _CONFIG:
                os.replace(partial / name, folder / name)
        for pattern in ("model*.safetensors", "model*.safetensors.index.json", "hf_quant_*.json"):
            for file in folder.glob(pattern):
                if file.name not in names:
                    file.unlink()
        if _CONFIG in names:
            os.replace(partial / _CONFIG, folder / _CONFIG)
        _sync(folder)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` that takes its place at the end, and is gone after an error."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _temporary(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder, which is removed afterwards if it is still there.

    Those of the same prefix that a killed process has left are removed first.
    """
    for old in parent.glob(f"{glob.escape(prefix)}*.partial"):
        with _lock(old) as is_ours:
            if is_ours:
                shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=parent))
    try:
        with _lock(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Lock a folder, and yield whether that could be done; the lock goes with the process."""
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
    """Refuse to begin what cannot fit.

    Raises:
        OSError: the disk of `folder` has not so many free bytes.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        what = f"{os.strerror(errno.ENOSPC)}: {num_bytes} bytes are needed and {free} are free"
        raise OSError(errno.ENOSPC, what)


@contextlib.contextmanager
def _naming_full_disks(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        why = error.strerror or os.strerror(error.errno)
        raise OSError(error.errno, f"{why}; nothing was written", str(path)) from error


def _sync(path: Path) -> None:
    """Have the disk write a file, or a folder's names, now."""
    if path.is_dir() and os.name == "nt":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
