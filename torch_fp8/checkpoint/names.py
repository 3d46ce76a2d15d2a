"""The names and dtypes of a model's tensors in checkpoints, as transformers saves them.

transformers may rename a tensor when it saves it (Mixtral's router), and it splits the fused
weights of experts (E, R, C) into a matrix for each expert and projection. To find out how, this
module runs transformers' own conversion on row numbers instead of values, one number for each row
of a fused weight. The numbers in the result show which rows a stored matrix has.

Tensors that are not in FP8 are BF16 in an exported checkpoint. Engines compute in one 16-bit dtype.
transformers leaves every other ``weight`` of a file with FP8 weights in its dtype, so two dtypes
would meet in the first product. BF16 is what training under autocast multiplies by. It holds the
values of FP8 layers that a format cannot hold, and every GPU with FP8 supports it. transformers
keeps some parameters in float32 and lists them in the model's class; these and buffers keep their
dtype.
"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class StoredPart(NamedTuple):
    """A tensor of a checkpoint: a tensor of the model, or rows of one.

    Attributes:
        name: the name in the checkpoint.
        expert: the expert whose matrix it is, or None if it is the whole tensor.
        begin, end: the rows of the expert's matrix in the fused weight.
    """

    name: str
    expert: int | None = None
    begin: int = 0
    end: int = 0

    def of(self, fused: Tensor) -> Tensor:
        """Return the part's values from the tensor of the model."""
        return fused if self.expert is None else fused[self.expert, self.begin : self.end]


def own_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs that a module itself adds to a state dict."""
    for own, tensor in (*module._parameters.items(), *module.named_buffers(recurse=False)):
        if tensor is not None and own not in module._non_persistent_buffers_set:
            yield f"{name}.{own}".lstrip("."), tensor


def homes_of(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Map each name in the state dict to the (module, name) pairs that share its tensor."""
    sharing: dict[int, list[tuple[nn.Module, str]]] = {}
    homes = {}
    for prefix, module in model.named_modules():
        for key, tensor in own_tensors(prefix, module):
            owners = sharing.setdefault(id(tensor), [])
            owners.append((module, key.rpartition(".")[2]))
            homes[key] = owners
    return homes


def stored_parts(
    model: nn.Module, shapes: Mapping[str, torch.Size], fused: Collection[str]
) -> dict[str, list[StoredPart]]:
    """Return the checkpoint's tensors for each tensor of a model, in the order of experts and rows.

    Args:
        model: the transformers model.
        shapes: the shapes of its tensors by name.
        fused: the names of the tensors that hold the weights of several experts.
    Raises:
        ValueError: transformers converts a tensor in another way when it saves it.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:  # transformers 4, or a model of another library
        return {key: [StoredPart(key)] for key in shapes}
    plain = [key for key in shapes if key not in fused]
    numbers = {
        key: torch.tensor([i], dtype=torch.int64, device="cpu") for i, key in enumerate(plain)
    }
    parts: dict[str, list[StoredPart]] = {key: [] for key in shapes}
    for name, converted in revert(model, dict(numbers)).items():
        parts[plain[int(converted.flatten()[0])]].append(StoredPart(name))
    for key in shapes:
        if key in fused:
            parts[key] = _of_fused(key, shapes[key], revert, model)
        elif len(parts[key]) != 1:
            raise _unknown(key)
    return parts


def _of_fused(key: str, shape: torch.Size, revert: Any, model: nn.Module) -> list[StoredPart]:
    """Return the parts of a fused weight (E, R, C)."""
    numbers = torch.arange(shape[:2].numel(), dtype=torch.int64, device="cpu")
    numbers = numbers.view(*shape[:2], 1)  # (E, R, 1)
    parts = []
    for name, converted in revert(model, {key: numbers}).items():
        rows = converted.flatten()
        expert, begin = divmod(int(rows[0]), shape[1])
        whole = rows.numel() == numbers.numel()
        part = StoredPart(name) if whole else StoredPart(name, expert, begin, begin + rows.numel())
        if not torch.equal(part.of(numbers).flatten(), rows):
            raise _unknown(key)
        parts.append(part)
    parts.sort(key=lambda part: (part.expert or 0, part.begin))
    if not torch.equal(
        torch.cat([part.of(numbers).flatten() for part in parts]), numbers.flatten()
    ):
        raise _unknown(key)
    return parts


def _unknown(key: str) -> ValueError:
    return ValueError(
        f"'{key}' has another name or shape in checkpoints: transformers converts it on saving in "
        "a way that this export does not support; save the model with save_pretrained"
    )


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
