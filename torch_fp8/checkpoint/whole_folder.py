"""`whole_folder`: write a folder completely or not at all.

Files are written to a temporary folder, which the process locks. If a process is killed, the folder
remains without a lock, and the next write to the same place removes it.
"""

import contextlib
import errno
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


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
    """Yield a temporary folder beside `path`, which is renamed to `path` after the block succeeds.

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
