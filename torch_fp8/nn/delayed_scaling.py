"""Delayed scaling: the scales of all layers, renewed whenever an optimizer has made a step.

This is Transformer Engine's ``DelayedScaling``: the scale of a cast is known before it, and comes
from the amaxes of past steps. What the casts of a step have found, in as many micro-batches as it
has, is one entry of a history. Two things differ. A layer's first step takes the scales of the
tensors at hand, where Transformer Engine starts with scale 1 and flushes gradients; and an operand
of which a layer has seen nothing but zeros is expected to be as large as the largest of its kind
elsewhere in the model.

Layers on ranks that share a sharded weight agree on all scales: one reduction a step.
"""

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_fp8.quantization.scaling import delayed_scale, past_amax, push_amax

if TYPE_CHECKING:
    from torch_fp8.nn.scaling_buffers import ScalingBuffers

BUFFER = "fp8_amax_history"
NUMBER = "_fp8_number"
"""The attribute that orders layers, equally on all ranks."""

_layers: "weakref.WeakValueDictionary[int, ScalingBuffers]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_hooks: list[Any] = []


def track(layer: "ScalingBuffers") -> None:
    """Renew the scales of a layer after each step of an optimizer, for as long as it lives."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    _layers[layer.__dict__.setdefault(NUMBER, next(_numbers))] = layer


def untrack(layer: "ScalingBuffers") -> None:
    """Undo `track`."""
    _layers.pop(layer.__dict__.pop(NUMBER, -1), None)
    if not _layers and _hooks:
        _hooks.pop().remove()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Renew the scales of layers that have run in eager mode, or whose weights have made the step.

    A graph of torch.compile leaves no trace of having run. Ranks agree on these layers, which they
    need not on all that are still in memory.
    """
    groups = (group["params"] for group in optimizer.param_groups)
    held = set(map(id, itertools.chain.from_iterable(groups)))
    renew_scales(
        layer
        for layer in list(_layers.values())
        if layer.fp8_recorded or (layer.training and id(layer.weight) in held)
    )


@torch.no_grad()
def renew_scales(layers: Iterable["ScalingBuffers"]) -> None:
    """Push what the casts of layers have recorded into the histories, and make new scales of these.

    Args:
        layers: the same in the same order on all ranks.
    """
    for (mesh, *_), members in _by_kind(layers).items():
        _renew(members, mesh)


@torch.no_grad()
def restore_scales(layers: Iterable["ScalingBuffers"]) -> None:
    """Make the scales of the histories, which were loaded.

    Args:
        layers: all of one model.
    """
    for members in _by_kind(layers).values():
        histories = torch.stack([layer.scaling_buffers()[0] for layer in members])
        _take_scales(members, scales_of(members[0], histories))


def _by_kind(layers: Iterable["ScalingBuffers"]) -> "dict[Any, list[ScalingBuffers]]":
    """Sort layers by what they have in common whose scales are made together."""
    kinds: dict[Any, list[ScalingBuffers]] = {}
    for layer in layers:
        if BUFFER in layer._buffers and not layer.scaling_buffers()[0].is_meta:
            kinds.setdefault(_kind(layer), []).append(layer)
    return kinds


def _kind(layer: "ScalingBuffers") -> tuple[Any, ...]:
    history, config, recipe = layer.scaling_buffers()[0], layer.fp8_config, layer.fp8_recipe
    mesh = layer.weight.device_mesh if isinstance(layer.weight, DTensor) else None
    formats = recipe.input.format, recipe.weight.format, recipe.grad_output.format
    return mesh, history.device, history.shape, formats, config.amax_compute_algo, config.margin


def _renew(layers: "Sequence[ScalingBuffers]", mesh: Any) -> None:
    """Renew the scales of layers of one kind.

    Args:
        mesh: the ranks that agree; None: each has scales of its own.
    """
    histories, _, amaxes, grad_amaxes = map(
        list, zip(*(layer.scaling_buffers() for layer in layers), strict=True)
    )
    pairs = zip(amaxes, grad_amaxes, strict=True)
    recorded = torch.cat([slot for pair in pairs for slot in pair]).view(-1, 3)
    for dim in range(0 if mesh is None else mesh.ndim):
        # Backends differ in the maximum of a number and NaN, not in that of a number and infinity.
        recorded = recorded.nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(recorded, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    algorithm = layers[0].fp8_config.amax_compute_algo
    pushed = push_amax(torch.stack(histories), recorded, algorithm)
    torch._foreach_copy_(histories, pushed.unbind())
    torch._foreach_zero_([*amaxes, *grad_amaxes])
    _take_scales(layers, scales_of(layers[0], pushed))


def _take_scales(layers: "Sequence[ScalingBuffers]", scales: Tensor) -> None:
    """Have layers cast with scales (L, 3) from now on."""
    of_each = scales[..., None].repeat(1, 1, 4).unbind()
    torch._foreach_copy_([layer.scaling_buffers()[1] for layer in layers], of_each)
    for layer, own in zip(layers, of_each, strict=True):
        layer.take_scales(own)
        layer.fp8_recorded = False


def scales_of(layer: "ScalingBuffers", histories: Tensor) -> Tensor:
    """Return the scales (L, 3) that the histories (L, 3, H) of layers suggest.

    Args:
        layer: one of them.
    """
    config, recipe = layer.fp8_config, layer.fp8_recipe
    past = past_amax(histories, config.amax_compute_algo)
    past = torch.where(past > 0, past, past.amax(0))
    formats = recipe.input.format, recipe.weight.format, recipe.grad_output.format
    columns = zip(past.unbind(1), formats, strict=True)
    return torch.stack([delayed_scale(column, of, config.margin) for column, of in columns], 1)
