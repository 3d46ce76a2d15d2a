"""The version of this package, and a check for the oldest supported torch."""

import re
import warnings
from importlib import metadata
from pathlib import Path

with warnings.catch_warnings():  # importing torch without NumPy warns; this package needs none
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch

OLDEST_TORCH = (2, 11)


def installed_version() -> str:
    """Return the version of the installed distribution, else the one in pyproject.toml."""
    version = distribution_version("torch-fp8")
    if version is not None:
        return version
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    text = project.read_text() if project.is_file() else ""
    match = re.search(r'^name = "torch-fp8"\nversion = "(.*)"$', text, re.MULTILINE)
    return match[1] if match else "unknown"


def distribution_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except Exception:  # not installed, or its metadata is broken
            continue
    return None


def check_torch(version: str) -> None:
    """Raise ImportError if torch is older than `OLDEST_TORCH`.

    Args:
        version: version string such as ``torch.__version__``.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"torch-fp8 needs torch {wanted} or later, and this is torch {version}: "
            f"pip install 'torch>={wanted}'",
            name=__package__,  # `python -m torch_fp8` then prints this without a traceback
        )


__version__ = installed_version()
check_torch(torch.__version__)
