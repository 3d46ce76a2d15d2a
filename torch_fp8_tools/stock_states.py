"""Conversion of files with 8-bit optimizer states to the stock format.

``FP8Config(checkpoint_states="fp8")`` saves moments as codes and scales
(`torch_fp8.optim.state`). `convert_optimizer_file` turns such a file into one that a stock
optimizer can load. If a file holds several optimizers or a model, the rest is copied.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from torch_fp8.checkpoint.files import whole_file
from torch_fp8.optim.checkpoint import OPTIONS_KEY
from torch_fp8.optim.state import FORMATS_KEY, STATE_FORMATS, decoded, is_encoded
from torch_fp8.quantization.wording import counted


def convert(options: argparse.Namespace) -> int:
    """Run the sub-command ``torch-fp8 convert-optimizer``; returns the exit status."""
    print(convert_optimizer_file(options.checkpoint, options.path))
    return 0


def convert_optimizer_file(source: Path, target: Path) -> str:
    """Write a file's optimizer states in torch.optim.AdamW's format; return what was done.

    Args:
        source: a file written by ``torch.save`` with an optimizer's state, or with a dict or list
            that contains some.
        target: a file that does not exist yet; if the conversion fails, it is not created.
    Raises:
        ValueError: `target` exists; `source` is not such a file, holds objects that torch does not
            load without running their code, or has no 8-bit moments.
        OSError: a file cannot be read or written.
    """
    if target.exists():
        raise ValueError(f"{str(target)!r} exists; name a file that does not")
    if source.is_dir():
        raise ValueError(
            f"{str(source)!r} is a folder; name the file in it that holds the optimizer's state"
        )
    count = [0]
    converted = _converted(_loaded(source), count)
    if not count[0]:
        raise ValueError(
            f"{str(source)!r} has no 8-bit moments: it is already in the stock format, or is not "
            "an optimizer checkpoint"
        )
    with whole_file(target) as partial:
        torch.save(converted, partial)
    return f"{target}: {counted(count[0], 'moment')} in float32, {target.stat().st_size:,} bytes"


def _loaded(source: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a broken file can raise anything
        raise ValueError(f"{str(source)!r} {_why_not_loaded(source)}") from error


def _why_not_loaded(source: Path) -> str:
    """Say in our words why a file cannot be loaded; torch's message proposes to run its code."""
    try:
        unknown = ", ".join(sorted(get_unsafe_globals_in_checkpoint(source))[:3])
    except Exception:  # another kind of file
        unknown = ""
    if not unknown:
        return (
            "is not a file that torch.save wrote, or is cut off; name the one that holds the "
            "optimizer's state: optimizer.pt of transformers, optimizer.bin of Accelerate, a .ckpt "
            "of Lightning"
        )
    return (
        f"holds objects other than tensors and numbers ({unknown}), and loading them could run "
        "code; save optimizer.state_dict() alone with torch.save, and convert that file"
    )


def _converted(value: Any, count: list[int]) -> Any:
    """Return a copy of nested dicts and lists with float32 moments."""
    if isinstance(value, dict):
        if isinstance(value.get("state"), dict) and "param_groups" in value:
            formats = (value.get(OPTIONS_KEY) or {}).get(FORMATS_KEY, STATE_FORMATS)
            if formats != STATE_FORMATS:
                raise ValueError(
                    f"its moments are in the formats {formats!r:.200}, but this version of "
                    f"torch-fp8 reads {STATE_FORMATS}"
                )
        plain = decoded(value) if any(is_encoded(name, value) for name in STATE_FORMATS) else value
        count[0] += sum(is_encoded(name, value) for name in STATE_FORMATS)
        result = {key: _converted(item, count) for key, item in plain.items()}
        if isinstance(result.get(OPTIONS_KEY), dict):
            result[OPTIONS_KEY].pop(FORMATS_KEY, None)
        return result
    if isinstance(value, (list, tuple)) and not isinstance(value, Tensor):
        return type(value)(_converted(item, count) for item in value)
    return value
