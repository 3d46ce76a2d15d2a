"""The dtype of what is not in FP8 in an exported checkpoint: BF16.

Engines compute in one dtype of 16 bits. transformers leaves each ``weight`` beside FP8 in the dtype
of the file, so that two dtypes would meet in the first product. BF16 is what training under
autocast multiplies by, it holds the values of FP8 layers that a format cannot hold, and every card
with FP8 runs it. transformers itself keeps some parameters in float32 and names them in the model's
class; these and buffers stay as they are.
"""

import re

import torch
from torch import Tensor, nn

PLAIN = torch.bfloat16


def plain_dtype(model: nn.Module, key: str, tensor: Tensor, stored: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is written that is not in FP8.

    Args:
        model: model of transformers.
        key: name of the tensor.
        tensor: parameter or buffer of the model.
        stored: dtype of its values.
    """
    is_cast = isinstance(tensor, nn.Parameter) and stored.is_floating_point
    return (
        PLAIN if is_cast and not _is_named(model, "_keep_in_fp32_modules_strict", key) else stored
    )


def is_left_by_quantizers(model: nn.Module, name: str) -> bool:
    """Return whether transformers' quantizers leave a module in high precision by its class."""
    return _is_named(model, "_keep_in_fp32_modules", name)


def _is_named(model: nn.Module, attribute: str, name: str) -> bool:
    patterns = [part.replace("*", ".*") for part in getattr(model, attribute, None) or ()]
    return any(re.search(rf"(^|\.){pattern}(\.|$)", name) for pattern in patterns)
