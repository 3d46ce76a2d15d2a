"""`model_folder` and `model_class`: the local folder of a transformers model, and its class."""

import contextlib
import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def imported(package: str, why: str) -> Any:
    """Import and return a package; if it is missing, raise ImportError with `why` it is needed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing_package(package, why, error) from error


def missing_package(package: str, why: str, error: BaseException) -> ImportError:
    """Return an error that says what to install.

    Args:
        package: the name of the package, or of the module in it, that cannot be imported.
        why: the purpose for which it is needed.
        error: the failure; this package is missing, or one that it imports.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    cause = str(error).partition("\n")[0].strip()
    return ImportError(f"{why}: pip install {package.partition('.')[0]} ({cause})")


def model_folder(name: str | Path) -> Path | None:
    """Return the folder of a model: `name` itself, or the hub's cache of it on this machine.

    Nothing is downloaded. Without such a folder, or such a model in the cache, return None.

    Args:
        name: a folder, or the name of a model on the Hugging Face hub such as ``org/model``.
    """
    from torch_fp8.checkpoint.files import folder_of

    with contextlib.suppress(ImportError):
        importlib.import_module("huggingface_hub")
    return Path(name) if Path(name).exists() else folder_of(SimpleNamespace(name_or_path=str(name)))


def model_class(checkpoint: Path) -> Any:
    """Return the class that ``architectures`` in ``config.json`` names.

    Args:
        checkpoint: a folder as ``save_pretrained`` writes it.
    Raises:
        ValueError: there is no readable ``config.json``, or it names no class of transformers.
        ImportError: transformers is not installed.
    """
    file = checkpoint / "config.json"
    if not checkpoint.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(checkpoint)):
        raise ValueError(
            f"{str(checkpoint)!r} is neither a folder nor a model in the Hugging Face hub cache. "
            f"If it is a model on the hub, download it: hf download {checkpoint}"
        )
    try:
        names = json.loads(file.read_text()).get("architectures") or [None]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error}") from error
    why = "transformers builds the model of a checkpoint"
    transformers = imported("transformers", why)
    try:
        cls = getattr(transformers, str(names[0]), None)  # imports the class's module
    except ImportError as error:
        raise missing_package("transformers", why, error) from error
    if cls is None:
        raise ValueError(
            f"{str(file)!r} names the architecture {names[0]!r}, which transformers "
            f"{transformers.__version__} does not have; load the model and call torch_fp8.export"
        )
    return cls
