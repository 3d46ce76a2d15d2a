"""Delayed scaling: the scales of all layers, renewed whenever an optimizer has made a step.

This is Transformer Engine's ``DelayedScaling``: the scale of a cast is known before it, and comes
from the amaxes of past steps. What the casts of a step have found, in as many micro-batches as it
has, is one entry of a history. Two things differ. A layer's first step takes the scales of the
tensors at hand, where Transformer Engine starts with scale 1 and flushes gradients; and an operand
of which a layer has seen nothing but zeros is expected to be as large as the largest of its kind
elsewhere in the model.

A cast raises the operand's *slot*, () float32, to the largest magnitude of what it casts. When an
optimizer has made a step, the slots of all layers are pushed into the histories, and the scales of
the next step are made of these. Layers on ranks that share a sharded weight agree on all scales:
one reduction a step.

Histories, scales and slots are non-persistent buffers of the layer: outside of ``state_dict``, and
moved with it by ``Module.to`` and by FSDP2, which moves parameters and buffers alone. What is made
of them lies in `LayerScaling`. The operands are input (0), weight (1) and gradient of the output
(2).
"""

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_fp8.ops.hardware import is_capturing
from torch_fp8.quantization.scaling import delayed_scale, past_amax, push_amax
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.scale_source import ScaleSource

INPUT, WEIGHT, GRAD_OUTPUT = range(3)
BUFFERS = ("fp8_amax_history", "fp8_scales", "fp8_amaxes", "fp8_grad_amax")
"""Buffers of delayed scaling: histories (3, H), the newest amax first; scales (3, 4), each four
times, since GEMMs take scales at multiples of 16 bytes, and 0 where they are not known; the slots
of input and weight (2,); the slot of the gradient (1,).

Forward and backward write slots in tensors of their own, as graphs of torch.compile ask for.
"""

_layers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_hooks: list[Any] = []


def scaling_buffers(layer: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors that `BUFFERS` names.

    Raises:
        AttributeError: a layer without delayed scaling.
    """
    history, scales, amaxes, grad_amax = (local(getattr(layer, name)) for name in BUFFERS)
    return history, scales, amaxes, grad_amax


class LayerScaling:
    """Delayed scaling of one layer, whose buffers have the numbers. Copies make it anew of these.

    Attributes:
        ready: whether the scales are known.
        recorded: whether an eager forward in training mode has recorded amaxes since an optimizer's
            step.
        number: orders layers, equally on all ranks; None: the layer is not renewed.
    """

    def __init__(self) -> None:
        self.ready = self.recorded = False
        self.number: int | None = None
        self._sources: tuple[ScaleSource, ...] | None = None

    def start(self, layer: Any) -> None:
        """Create the layer's buffers, with empty histories."""
        shapes = (3, layer.fp8.config.amax_history_len), (3, 4), (2,), (1,)
        for name, shape in zip(BUFFERS, shapes, strict=True):
            empty = torch.empty(shape, dtype=torch.float32, device=layer.weight.device)
            layer.register_buffer(name, empty, persistent=False)
        self.reset(layer)
        self.track(layer)

    def reset(self, layer: Any) -> None:
        """Empty the histories, of a module on the meta device that was materialised."""
        for buffer in scaling_buffers(layer):
            buffer.zero_()
        self.ready = self.recorded = False
        self.forget(layer)

    def stop(self, layer: Any) -> None:
        """Remove the layer's buffers, and renew its scales no more."""
        _layers.pop(-1 if self.number is None else self.number, None)
        if not _layers and _hooks:
            _hooks.pop().remove()
        for name in BUFFERS:
            if name in layer._buffers:
                delattr(layer, name)

    def track(self, layer: Any) -> None:
        """Renew the layer's scales after each step of an optimizer, for as long as it lives."""
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_after_step))
        if self.number is None:
            self.number = next(_numbers)
        _layers[self.number] = layer

    def sources(self, layer: Any) -> tuple[ScaleSource, ...]:
        """Return what knows the scales of the operands, and takes their amaxes, in eager code.

        The slots of input and weight are raised in training mode alone.
        """
        sources = self._all_sources(layer)
        return sources[:3] if layer.training else (*sources[3:], sources[GRAD_OUTPUT])

    def _all_sources(self, layer: Any) -> tuple[ScaleSource, ...]:
        """Return the sources of all operands, and those of input and weight in evaluation."""
        if self._sources is None:
            with torch.inference_mode(False):
                _, scales, amaxes, grad_amax = scaling_buffers(layer)
                slots = *amaxes.unbind(), grad_amax[0], None, None
                self._sources = tuple(ScaleSource(None, slot) for slot in slots)
                if self.ready:
                    self.take(layer, scales.clone())
        return self._sources

    def take(self, layer: Any, scales: Tensor) -> None:
        """Cast with other scales from now on.

        Args:
            layer: the layer.
            scales: (3, 4) float32, as in the buffer; nobody writes to it any more.
        """
        known = scales[:, 0].unbind()  # three of (): input, weight, gradient
        for source, scale in zip(self._all_sources(layer), (*known, *known[:2]), strict=True):
            if source.scale is not None and is_capturing(scale.device):
                source.scale.copy_(scale)  # where the casts of a CUDA graph of a whole step read it
            else:
                source.scale = scale
        self.ready = True
        layer.fp8.payloads.forget_evaluation()

    def forget(self, layer: Any) -> None:
        """Drop what was made of the buffers."""
        self._sources = None
        layer.fp8.forget_quantizers()
        layer.fp8.payloads.forget_evaluation()

    def after_move(self, layer: Any, before: Mapping[str, Tensor]) -> None:
        """Take buffers that ``Module._apply`` has moved.

        Amaxes follow the device only: Module.to(bfloat16) casts, to_empty leaves garbage.

        Args:
            layer: the layer.
            before: name to buffer as it was.
        """
        for name, buffer in before.items():
            moved = layer._buffers[name]
            if moved is not None and moved is not buffer and not buffer.is_meta:
                layer._buffers[name] = buffer.to(moved.device)
        self.forget(layer)
        if any(buffer.is_meta for buffer in before.values()):
            self.reset(layer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "number": None, "_sources": None}


def pushed_history(layer: Any) -> Tensor:
    """Return the histories (3, H) with what was recorded since the last step of an optimizer."""
    history, _, amaxes, grad_amax = scaling_buffers(layer)
    recorded = torch.cat([amaxes, grad_amax])  # (2,), (1,) -> (3,)
    return push_amax(history, recorded, layer.fp8.config.amax_compute_algo)


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
        if layer.fp8.scaling.recorded or (layer.training and id(layer.weight) in held)
    )


@torch.no_grad()
def renew_scales(layers: Iterable[Any]) -> None:
    """Push what the casts of layers have recorded into the histories, and make new scales of these.

    Args:
        layers: the same in the same order on all ranks.
    """
    for (mesh, *_), members in _by_kind(layers).items():
        _renew(members, mesh)


@torch.no_grad()
def restore_scales(layers: Iterable[Any]) -> None:
    """Make the scales of the histories, which were loaded.

    Args:
        layers: all of one model.
    """
    for members in _by_kind(layers).values():
        # (L, 3, H)
        histories = torch.stack([scaling_buffers(layer)[0] for layer in members])
        _take_scales(members, scales_of(members[0], histories))


def _by_kind(layers: Iterable[Any]) -> dict[Any, list[Any]]:
    """Sort layers by what they have in common whose scales are made together."""
    kinds: dict[Any, list[Any]] = {}
    for layer in layers:
        if layer.fp8.scaling is not None and not scaling_buffers(layer)[0].is_meta:
            kinds.setdefault(_kind(layer), []).append(layer)
    return kinds


def _kind(layer: Any) -> tuple[Any, ...]:
    history, config, recipe = scaling_buffers(layer)[0], layer.fp8.config, layer.fp8.recipe
    mesh = layer.weight.device_mesh if isinstance(layer.weight, DTensor) else None
    formats = recipe.input.format, recipe.weight.format, recipe.grad_output.format
    return mesh, history.device, history.shape, formats, config.amax_compute_algo, config.margin


def _renew(layers: Sequence[Any], mesh: Any) -> None:
    """Renew the scales of layers of one kind.

    Args:
        mesh: the ranks that agree; None: each has scales of its own.
    """
    histories, _, amaxes, grad_amaxes = map(
        list, zip(*(scaling_buffers(layer) for layer in layers), strict=True)
    )
    pairs = zip(amaxes, grad_amaxes, strict=True)
    recorded = torch.cat([slot for pair in pairs for slot in pair]).view(-1, 3)  # (L, 3)
    for dim in range(0 if mesh is None else mesh.ndim):
        # Backends differ in the maximum of a number and NaN, not in that of a number and infinity.
        recorded = recorded.nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(recorded, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    algorithm = layers[0].fp8.config.amax_compute_algo
    pushed = push_amax(torch.stack(histories), recorded, algorithm)
    torch._foreach_copy_(histories, pushed.unbind())
    torch._foreach_zero_([*amaxes, *grad_amaxes])
    _take_scales(layers, scales_of(layers[0], pushed))


def _take_scales(layers: Sequence[Any], scales: Tensor) -> None:
    """Have layers cast with scales (L, 3) from now on."""
    of_each = scales[..., None].repeat(1, 1, 4).unbind()  # (L, 3) -> L of (3, 4), see `BUFFERS`
    torch._foreach_copy_([scaling_buffers(layer)[1] for layer in layers], of_each)
    for layer, own in zip(layers, of_each, strict=True):
        layer.fp8.scaling.take(layer, own)
        layer.fp8.scaling.recorded = False


def scales_of(layer: Any, histories: Tensor) -> Tensor:
    """Return the scales (L, 3) that the histories (L, 3, H) of layers suggest.

    Args:
        layer: one of them.
    """
    config, recipe = layer.fp8.config, layer.fp8.recipe
    past = past_amax(histories, config.amax_compute_algo)  # (L, 3)
    past = torch.where(past > 0, past, past.amax(0))
    formats = recipe.input.format, recipe.weight.format, recipe.grad_output.format
    columns = zip(past.unbind(1), formats, strict=True)
    return torch.stack([delayed_scale(column, of, config.margin) for column, of in columns], 1)
