"""The dtype of tensors that are not in FP8 in an exported checkpoint: BF16.

Engines compute in one 16-bit dtype. transformers leaves each ``weight`` beside FP8 weights in the
file's dtype, so two dtypes would meet in the first product. BF16 is what training under autocast
multiplies by. It holds the values of FP8 layers that a format cannot hold, and every GPU with FP8
supports it. transformers keeps some parameters in float32 and lists them in the model's class;
these and buffers keep their dtype.
"""

import re

import torch
from torch import Tensor, nn

PLAIN = torch.bfloat16


def plain_dtype(model: nn.Module, key: str, tensor: Tensor, stored: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor outside FP8 is written.

    Args:
        model: the transformers model.
        key: the tensor's name.
        tensor: the parameter or buffer of the model.
        stored: the dtype of its values.
    """
    is_cast = isinstance(tensor, nn.Parameter) and stored.is_floating_point
    return (
        PLAIN if is_cast and not _is_named(model, "_keep_in_fp32_modules_strict", key) else stored
    )


def is_left_by_quantizers(model: nn.Module, name: str) -> bool:
    """Return whether the model's class tells transformers' quantizers to skip a module."""
    return _is_named(model, "_keep_in_fp32_modules", name)


def _is_named(model: nn.Module, attribute: str, name: str) -> bool:
    patterns = [part.replace("*", ".*") for part in getattr(model, attribute, None) or ()]
    return any(re.search(rf"(^|\.){pattern}(\.|$)", name) for pattern in patterns)
