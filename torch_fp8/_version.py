"""The version of this package, and the oldest torch that it runs on."""

import re
import warnings
from importlib import metadata
from pathlib import Path

with warnings.catch_warnings():  # torch warns while it is imported; nothing here needs NumPy
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch

OLDEST_TORCH = (2, 11)


def installed_version() -> str:
    """Return the installed distribution's version; in a source tree not installed, its
    pyproject's.
    """
    try:
        return metadata.version("torch-fp8")
    except metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        text = project.read_text() if project.is_file() else ""
        match = re.search(r'^name = "torch-fp8"\nversion = "(.*)"$', text, re.MULTILINE)
        return match[1] if match else "unknown"


def triton_version() -> str:
    """Return the version of the installed Triton, which compiles the kernels; ``none`` if there is
    none.
    """
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def check_torch(version: str) -> None:
    """Raise ImportError where torch is too old.

    Args:
        version: a version such as ``torch.__version__``.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"torch-fp8 needs torch {wanted} or later, and this is torch {version}: "
            f"pip install 'torch>={wanted}'",
            name=__package__,  # so that `python -m torch_fp8` says this and shows no traceback
        )


__version__ = installed_version()
check_torch(torch.__version__)
