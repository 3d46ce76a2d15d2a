"""`model_class`: the class of transformers that a checkpoint is of."""

import importlib
import json
import re
from pathlib import Path
from typing import Any


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
            f"{str(checkpoint)!r} is no folder here. If it is a model of the Hugging Face hub, "
            f"download it: hf download {checkpoint} --local-dir {checkpoint.name}"
        )
    try:
        names = json.loads(file.read_text()).get("architectures") or [None]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error}") from error
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"transformers builds the model of a checkpoint; pip install transformers ({error})"
        ) from error
    cls = getattr(transformers, str(names[0]), None)
    if cls is None:
        raise ValueError(
            f"{str(file)!r} names the architecture {names[0]!r}, which transformers "
            f"{transformers.__version__} has not; load the model and call torch_fp8.export"
        )
    return cls
