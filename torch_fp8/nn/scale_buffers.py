"""Buffers of delayed scaling, and the tensors in which the layers of a block hold their scales."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.ops.hardware import is_capturing
from torch_fp8.tensor.base import in_shared_memory
from torch_fp8.tensor.dtensor import local

BUFFERS = ("fp8_amax_history", "fp8_scales", "fp8_input_amax", "fp8_weight_amax", "fp8_grad_amax")
"""Buffers of delayed scaling.

Histories (3, H) float32, the newest amax first; scales (3, 4) float32, each repeated four times
because GEMMs need scales at multiples of 16 bytes, and 0 if unknown; and a slot for each operand,
() int32, see `torch_fp8.quantization.scaling.raise_slot`. Slots are whole tensors, because the
kernels of a graph write to its inputs in place only if these are no views. The L layers of a block
hold their scales in one tensor (L, 3, 4) from their conversion on, because each input of a graph
takes host time, and because programs copy buffers between copies of a model.
"""
_BLOCK = re.compile(r"(.*?\.)??\d+\.")
"""The start of a layer's name that ends with the number of its block."""


def scaling_buffers(layer: Any) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return histories, scales and the three slots (see `BUFFERS`), as local tensors.

    Raises:
        AttributeError: the layer has no delayed scaling.
    """
    history, scales, *slots = (local(getattr(layer, name)) for name in BUFFERS)
    row = layer.fp8.scaling.row
    return history, scales if row is None else scales[row], tuple(slots)


def graph_buffers(layer: Any) -> tuple[Any, ...]:
    """Return the inputs of a compiled graph for a layer that is not sharded.

    They are the row of the layer's scales, see `BUFFERS`, or None if it has a tensor of its own;
    the scales, or None if they are not known; and three slots, without that of a weight whose cast
    has the current scale.
    """
    scaling = layer.fp8.scaling
    known = (scaling.row, layer.fp8_scales) if scaling.ready else (None, None)
    of_weight = layer.fp8_weight_amax if scaling.rule.eager else None
    return *known, layer.fp8_input_amax, of_weight, layer.fp8_grad_amax


def block_of(name: str) -> str | None:
    """Return the name of the block of a layer with this name, or None if it is in none."""
    start = _BLOCK.match(name)
    return start and start[0]


def _block(layer: Any) -> Any:
    """Return what the layers of one block have in common."""
    return layer.fp8.scaling.saturation, block_of(layer.fp8.name)


def unite_scales(layers: Sequence[Any]) -> None:
    """Let the layers of each block hold their scales in one tensor, if none is sharded."""
    for _, group in itertools.groupby(layers, _block):
        members = list(group)
        scales = [layer.fp8_scales for layer in members]
        apart = all(type(x) is Tensor and x.ndim == 2 and not stays(x) for x in scales)
        apart = apart and len({x.device for x in scales}) == 1
        if apart and len(members) > 1 and not isinstance(members[0].weight, DTensor):
            united = torch.stack(scales)
            for row, layer in enumerate(members):
                layer.fp8_scales, layer.fp8.scaling.row = united, row


def on_device(buffer: Any, row: int | None, device: torch.device) -> Tensor:
    """Return a buffer on a device; its values are undefined if it comes from the meta device.

    Args:
        buffer: one of `BUFFERS`.
        row: index of the layer, which moves alone, in a tensor that the layers of its block share:
            they share one on the new device, too. None if the buffer is the layer's own.
        device: the device.
    """
    if buffer.device == device:
        return buffer
    if row is None or type(buffer) is not Tensor:
        return torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    copies: dict[torch.device, Tensor] = vars(buffer).setdefault("fp8_copies", {})
    if device not in copies:
        copies[device] = torch.zeros_like(buffer, device=device)
    if not buffer.is_meta:
        copies[device][row].copy_(buffer[row])
    return copies[device]


def stays(scales: Tensor) -> bool:
    """Return whether other processes or a CUDA graph read the memory of these scales."""
    return in_shared_memory(scales) or is_capturing(scales.device)
