"""`whole_folder`: a folder that is there with everything in it, or not at all."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def refuse_existing(path: str | Path) -> Path:
    """Return `path` if a folder can be made there.

    Raises:
        ValueError: something is there already, or the folder above it is not.
    """
    path = Path(path).absolute()
    if path.exists() or path.is_symlink():
        raise ValueError(f"{str(path)!r} exists; name a folder that does not, nothing was written")
    if not path.parent.is_dir():
        raise ValueError(f"{str(path.parent)!r} is no folder; make it first, nothing was written")
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
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        with _naming_full_disks(path):
            yield made
            made.chmod(0o777 & ~_umask())
            for file in made.iterdir():
                _sync(file)
            _sync(made)
        os.rename(made, path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    _sync(path.parent)


@contextlib.contextmanager
def replaced_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder, whose files then replace those of the same name in `folder`.

    Each file is replaced in one step, and none before the block has succeeded. Weights of an
    earlier save that are not written again are removed.

    Args:
        folder: is made if it does not exist.
    Raises:
        OSError: the files cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".export.", suffix=".partial", dir=folder))
    try:
        with _naming_full_disks(folder):
            yield made
            for file in made.iterdir():
                _sync(file)
        names = sorted(file.name for file in made.iterdir())
        for name in names:
            os.replace(made / name, folder / name)
        for pattern in ("model*.safetensors", "model*.safetensors.index.json"):
            for file in folder.glob(pattern):
                if file.name not in names:
                    file.unlink()
    finally:
        shutil.rmtree(made, ignore_errors=True)


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
