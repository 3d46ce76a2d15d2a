"""Files of optimizer states in stock's format, made of those with 8-bit moments.

``FP8Config(checkpoint_states="fp8")`` saves moments as codes and scales
(`torch_fp8.optim.encoded_states`). A stock optimizer opens what `convert_optimizer_file` makes of
such a file. Where files hold more than one optimizer, or a model, the rest stays as it is.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_fp8.checkpoint.whole_folder import whole_file
from torch_fp8.optim.checkpoint import OPTIONS_KEY
from torch_fp8.optim.encoded_states import (
    FORMATS_KEY,
    RATIO_FORMATS,
    STATE_FORMATS,
    decoded,
    is_encoded,
)
from torch_fp8.quantization.wording import counted


def convert_optimizer_file(source: Path, target: Path) -> str:
    """Write a file's optimizer states in torch.optim.AdamW's format; return what was done.

    Args:
        source: written by ``torch.save``: an optimizer's state, or a dict or list that holds some.
        target: a file that does not exist; it is there with everything in it, or not at all.
    Raises:
        ValueError: `target` exists; `source` is no such file, or has no 8-bit moments.
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
    except Exception as error:  # as many kinds as there are files that are none
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{str(source)!r} is not a file of tensors: {reason:.200}") from error


def _converted(value: Any, count: list[int]) -> Any:
    """Return a copy of nested dicts and lists in which entries of moments are float32."""
    if isinstance(value, dict):
        if isinstance(value.get("state"), dict) and "param_groups" in value:
            _check_formats(value)
        plain = decoded(value) if any(is_encoded(name, value) for name in STATE_FORMATS) else value
        count[0] += sum(is_encoded(name, value) for name in STATE_FORMATS)
        result = {key: _converted(item, count) for key, item in plain.items()}
        if isinstance(result.get(OPTIONS_KEY), dict):
            result[OPTIONS_KEY].pop(FORMATS_KEY, None)
        return result
    if isinstance(value, (list, tuple)) and not isinstance(value, Tensor):
        return type(value)(_converted(item, count) for item in value)
    return value


def _check_formats(state_dict: dict[str, Any]) -> None:
    formats = (state_dict.get(OPTIONS_KEY) or {}).get(FORMATS_KEY, STATE_FORMATS)
    if formats not in (STATE_FORMATS, STATE_FORMATS | RATIO_FORMATS):
        raise ValueError(
            f"its moments are in the formats {formats!r:.200}, but this version of torch-fp8 reads "
            f"{STATE_FORMATS}"
        )
