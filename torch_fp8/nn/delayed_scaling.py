"""Delayed scaling: new scales for all layers after each step of the optimizer.

This is Transformer Engine's ``DelayedScaling``: the scale of a cast is known in advance, from the
amaxes of past steps. The casts of one step, over all its micro-batches, add one entry to a history.
There are two differences. In its first step a layer scales by the current tensors; Transformer
Engine starts with scale 1 and flushes gradients to zero. And if a layer has only seen zeros of an
operand, it assumes the largest amax of that operand among the other layers.

A cast raises the operand's *slot*, () float32, to the largest magnitude in its input. After the
optimizer's step, the slots of all layers are pushed into the histories, from which the scales of
the next step are computed. Ranks that share a sharded weight agree on all scales, by one reduction
per step.

Histories, scales and slots are non-persistent buffers of the layer. They are not in ``state_dict``,
and move with the layer by ``Module.to`` and FSDP2, which only moves parameters and buffers.
`LayerScaling` holds the objects derived from them. The operands are input (0), weight (1) and
gradient of the output (2).

A weight in two halves has its current amax from the optimizer's step, and is scaled by that
(`torch_fp8.tensor.halves.Halves.amax`).
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

from torch_fp8.autograd.current_pass import ran_in_graph
from torch_fp8.autograd.function import is_saved, outside_inference_mode
from torch_fp8.nn.saturation import Saturation
from torch_fp8.nn.scale_buffers import BUFFERS, on_device, scaling_buffers, stays, unite_scales
from torch_fp8.nn.scaling_rule import ScalingRule, scales_of
from torch_fp8.ops.hardware import is_capturing
from torch_fp8.quantization.scaling import ScaleSource, push_amax, shared_amaxes
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.split_weight import SplitWeight

INPUT, WEIGHT, GRAD_OUTPUT = range(3)

_layers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_hooks: list[Any] = []


class LayerScaling:
    """Delayed scaling of one layer. All numbers are in the layer's buffers.

    Args:
        rule: how scales are computed.

    Attributes:
        known: whether the scales are known.
        ready: whether the next casts use them; graphs guard on it.
        saturation: object that a model's layers share if eager code casts with current scales.
        recorded: whether an eager forward in training mode has recorded amaxes since the last step
            of an optimizer.
        number: place of the layer in an order that is equal on all ranks, or None if steps do not
            renew its scales.
        row: index of the layer's scales in a tensor with those of its block, or None.
    """

    def __init__(self, rule: ScalingRule) -> None:
        self.rule, self.saturation = rule, Saturation()
        self.known = self.ready = self.recorded = False
        self.number: int | None = None
        self.row: int | None = None
        self._sources: tuple[ScaleSource, ...] | None = None

    def start(self, layer: Any) -> None:
        """Create the layer's buffers with empty histories."""
        shapes = (3, self.rule.history_len), (3, 4), *[()] * 3
        dtypes = *[torch.float32] * 2, *[torch.int32] * 3
        self.row = None
        for name, shape, dtype in zip(BUFFERS, shapes, dtypes, strict=True):
            empty = torch.empty(shape, dtype=dtype, device=layer.weight.device)
            layer.register_buffer(name, empty, persistent=False)
        self.reset(layer)
        self.track(layer)

    def reset(self, layer: Any) -> None:
        """Empty the histories and forget the scales."""
        history, scales, slots = scaling_buffers(layer)
        for buffer in (history, scales, *slots):
            buffer.zero_()
        self.known = self.ready = self.recorded = False
        self.forget(layer)

    def stop(self, layer: Any) -> None:
        """Remove the layer's buffers and stop renewing its scales."""
        _layers.pop(-1 if self.number is None else self.number, None)
        if not _layers and _hooks:
            _hooks.pop().remove()
        for name in BUFFERS:
            if hasattr(layer, name):
                delattr(layer, name)

    def track(self, layer: Any) -> None:
        """Renew the layer's scales after each optimizer step, as long as the layer exists."""
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_after_step))
        if self.number is None:
            self.number = next(_numbers)
        _layers[self.number] = layer
        self.saturation.members.add(self)

    def sources(self, layer: Any) -> tuple[ScaleSource, ...]:
        """Return the scale sources of input, weight and gradient, for eager code.

        Only training mode records amaxes of input and weight.
        """
        sources = self._all_sources(layer)
        return sources[:3] if layer.training else (*sources[3:], sources[GRAD_OUTPUT])

    def _all_sources(self, layer: Any) -> tuple[ScaleSource, ...]:
        """Return the sources of the three operands, then of input and weight in evaluation."""
        if self._sources is None:
            with torch.inference_mode(False):
                for name in BUFFERS:
                    if (buffer := getattr(layer, name)).is_inference():  # copied or moved there
                        setattr(layer, name, buffer.clone())
                _, scales, slots = scaling_buffers(layer)
                self._sources = tuple(ScaleSource(None, slot) for slot in (*slots, None, None))
                if self.known:
                    self.take(layer, scales.clone())
        return self._sources

    def follow(self, layer: Any) -> None:
        """Take over scales that another process has computed in shared buffers."""
        scales = scaling_buffers(layer)[1]
        known = [source.scale for source in self._all_sources(layer)[:3]]
        current = [scale for scale in known if scale is not None]
        if scales.all() and not torch.equal(scales[:, 0], scales.new_tensor(current)):
            self.take(layer, scales.clone())

    def take(self, layer: Any, scales: Tensor) -> None:
        """Cast with other scales from now on.

        Args:
            layer: the layer.
            scales: (3, 4) float32, as in the buffer; the caller must not write to it later.
        """
        known = scales[:, 0].unbind()  # (3, 4) -> three scales (): input, weight, gradient
        for source, scale in zip(self._all_sources(layer), (*known, *known[:2]), strict=True):
            if source.scale is not None and is_capturing(scale.device):
                source.scale.copy_(scale)  # a CUDA graph of a whole step reads this memory
            else:
                source.scale = scale
        self.known, self.ready = True, not self.saturation.returns
        layer.fp8.payloads.forget()

    def forget(self, layer: Any) -> None:
        """Drop the objects derived from the buffers."""
        self._sources = None
        layer.fp8.forget_quantizers()
        layer.fp8.payloads.forget()

    def after_move(
        self, layer: Any, before: Mapping[str, Tensor], device: torch.device | None = None
    ) -> None:
        """Restore the buffers after ``Module._apply`` on their new device.

        Only the device changes: ``Module.to(bfloat16)`` would round them, and ``to_empty`` would
        leave garbage.

        Args:
            layer: the layer.
            before: buffers before the move, by name.
            device: their new device, or None for that to which ``Module._apply`` moved them.
        """
        for name, buffer in before.items():
            moved = getattr(layer, name)
            if moved is not None and (moved is not buffer or device is not None):
                row = self.row if name == "fp8_scales" else None
                setattr(layer, name, on_device(buffer, row, device or moved.device))
        self.forget(layer)
        if any(buffer.is_meta for buffer in before.values()):
            self.reset(layer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "number": None, "_sources": None}


def pushed_history(layer: Any) -> Tensor:
    """Return the histories (3, H), with the amaxes since the optimizer's last step in front."""
    history, _, slots = scaling_buffers(layer)
    recorded = torch.stack(slots).view(torch.float32)  # (3,)
    return push_amax(history, recorded, layer.fp8.scaling.rule.algorithm)


def _recorded(layer: Any) -> list[Tensor]:
    """Return the amaxes of the three operands in the last step, () float32 each.

    Casts record no amax for a weight in two halves that has its own; they scale by that one.
    """
    amaxes = [slot.view(torch.float32) for slot in scaling_buffers(layer)[2]]
    if isinstance(layer.weight, SplitWeight):
        current = layer.weight.halves.current_amax()
        amaxes[WEIGHT] = amaxes[WEIGHT] if current is None else current
    return amaxes


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Renew the scales of layers that ran in eager mode, or whose weights the optimizer stepped.

    The second condition covers graphs of torch.compile, which leave no trace of having run, and may
    have been traced for another model. A model that was not traced and runs in eager code is not
    looked at, because the host would wait for its amaxes. Ranks
    agree on this set of layers, while the layers still in memory may differ. After such graphs
    frozen weights that are not sharded are added; a layer that did not run keeps its histories.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    renew_scales(
        layer
        for layer in list(_layers.values())
        if layer.fp8.scaling.recorded
        or (
            layer.training
            and (layer.fp8.scaling.rule.eager or _may_run_in_graph(layer.fp8))
            and (id(layer.weight) in held or _is_frozen_in_graph(layer.weight))
        )
    )


def _may_run_in_graph(fp8: Any) -> bool:
    return fp8.scaling.saturation.traced or (ran_in_graph() and not fp8.called)


@torch.compiler.assume_constant_result
def note_trace(slot: Tensor) -> bool:
    """Note that torch.compile traces the layer with this slot of the gradient; Dynamo calls it."""
    for layer in list(_layers.values()):
        if layer.fp8_grad_amax is slot:
            layer.fp8.scaling.saturation.traced = True
    return True


def _is_frozen_in_graph(weight: Tensor) -> bool:
    return not weight.requires_grad and not isinstance(weight, DTensor) and ran_in_graph()


@outside_inference_mode
@torch.no_grad()
def renew_scales(layers: Iterable[Any]) -> None:
    """Push recorded amaxes into the histories of layers, and compute new scales from these.

    Args:
        layers: layers, in the same order on all ranks.
    """
    for (mesh, *_), members in _by_kind(layers).items():
        _renew(members, mesh)


@outside_inference_mode
@torch.no_grad()
def restore_scales(layers: Iterable[Any]) -> None:
    """Compute scales from histories that were loaded.

    Args:
        layers: all layers of one model with delayed scaling.
    """
    for members in _by_kind(layers).values():
        # (L, 3, H)
        histories = torch.stack([scaling_buffers(layer)[0] for layer in members])
        _take_scales(members, scales_of(members[0], histories))


def _by_kind(layers: Iterable[Any]) -> dict[Any, list[Any]]:
    """Group layers whose scales can be computed together."""
    kinds: dict[Any, list[Any]] = {}
    for layer in layers:
        if layer.fp8.scaling is not None and not scaling_buffers(layer)[0].is_meta:
            kinds.setdefault(_kind(layer), []).append(layer)
    return kinds


def _kind(layer: Any) -> tuple[Any, ...]:
    history, rule, recipe = scaling_buffers(layer)[0], layer.fp8.scaling.rule, layer.fp8.recipe
    mesh = layer.weight.device_mesh if isinstance(layer.weight, DTensor) else None
    formats = recipe.input.format, recipe.weight.format, recipe.grad_output.format
    return mesh, history.device, formats, rule, rule.eager or id(layer.fp8.scaling.saturation)


def _renew(layers: Sequence[Any], mesh: Any) -> None:
    """Renew the scales of one group of L layers.

    Args:
        layers: layers of one kind, see `_by_kind`.
        mesh: mesh of the ranks that agree on scales, or None if each rank has its own.
    """
    buffers = [scaling_buffers(layer) for layer in layers]
    histories = [history for history, _, _ in buffers]
    slots = [slot for _, _, of_layer in buffers for slot in of_layer]
    recorded = torch.stack(list(itertools.chain.from_iterable(map(_recorded, layers)))).view(-1, 3)
    for dim in range(0 if mesh is None else mesh.ndim):
        # Backends disagree on max(number, NaN), but not on max(number, infinity).
        recorded = recorded.nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(recorded, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    algorithm = layers[0].fp8.scaling.rule.algorithm
    if not layers[0].fp8.scaling.rule.eager:
        recorded[:, INPUT] = shared_amaxes(recorded[:, INPUT], recorded[:, GRAD_OUTPUT])
        if not _see_saturation(layers, recorded):
            return
    pushed = push_amax(torch.stack(histories), recorded, algorithm)  # (L, 3, H)
    zero = torch.zeros((), dtype=torch.int32, device=recorded.device)
    torch._foreach_copy_([*histories, *slots], [*pushed.unbind(), *[zero] * len(slots)])
    _take_scales(layers, scales_of(layers[0], pushed))


def _see_saturation(layers: Sequence[Any], recorded: Tensor) -> bool:
    """Set amaxes (L, 3) beyond the casts' scales to 0; return whether graphs recorded any."""
    scaling, recipe = layers[0].fp8.scaling, layers[0].fp8.recipe
    activations = recorded[:, [INPUT, GRAD_OUTPUT]]  # (L, 2)
    if not any(layer.fp8.scaling.known for layer in layers):  # before the first compiled step
        return not is_capturing(recorded.device) and bool(activations.any())
    largest = activations.new_tensor([recipe.input.format.max, recipe.grad_output.format.max])
    scales = torch.stack([scaling_buffers(layer)[1] for layer in layers])[..., 0]  # (L, 3)
    limits = scales[:, [INPUT, GRAD_OUTPUT]] * largest
    recorded[:, [INPUT, GRAD_OUTPUT]] = scaling.saturation.see(scaling.number, activations, limits)
    return True


def _take_scales(layers: Sequence[Any], scales: Tensor) -> None:
    """Make layers cast with scales (L, 3) from now on."""
    of_each = scales[..., None].repeat(1, 1, 4).unbind()  # (L, 3) -> L of (3, 4), see `BUFFERS`
    unite_scales(layers)
    for layer in layers:
        _leave_to_backward(layer)
    torch._foreach_copy_([scaling_buffers(layer)[1] for layer in layers], of_each)
    for layer, own in zip(layers, of_each, strict=True):
        layer.fp8.scaling.take(layer, own)
        layer.fp8.scaling.recorded = False


def _leave_to_backward(layer: Any) -> None:
    """Copy a buffer of scales that the backward of a graph will read, for all layers that hold it.

    Graphs save the buffer itself, since a copy would be a launch for each layer.
    """
    buffer, scales = layer.fp8_scales, local(layer.fp8_scales)
    if ran_in_graph() and not stays(scales) and is_saved(scales):
        copied = with_data(buffer, scales.clone())
        for other in list(_layers.values()):
            if other.fp8_scales is buffer:
                other.fp8_scales = copied
