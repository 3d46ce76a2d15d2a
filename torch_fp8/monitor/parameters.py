"""Measurements between a step's last backward and its update: histories, updates, gated MLPs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.conversion import detect_producers
from torch_fp8.monitor.layer_observer import GRAD_OUTPUT, INPUT, WEIGHT
from torch_fp8.monitor.statistics import (
    CLIP,
    GRAPHS,
    LEFT_OUT,
    OPERAND,
    SHARPNESS,
    SWIGLU,
    UPDATE,
    alignment_statistics,
    left_out,
    update_statistics,
)
from torch_fp8.nn.class_swap import unwrapped_name
from torch_fp8.nn.delayed_scaling import renew_scales
from torch_fp8.nn.gated_mlp import GatedMLPSpec
from torch_fp8.nn.linear import Float8Layer, is_paused
from torch_fp8.nn.saturation import Saturation
from torch_fp8.nn.scale_buffers import scaling_buffers
from torch_fp8.quantization.block_scaled import matrix_shape
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.released_grad import is_released

Layers = list[tuple[str, Float8Layer]]


def fp8_layers(model: nn.Module) -> Layers:
    """Return (name without wrappers, layer) of a model's converted linear layers."""
    named = model.named_modules()
    return [(unwrapped_name(n), m) for n, m in named if isinstance(m, Float8Layer)]


def look_at_histories(layers: Layers, reported: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield how many amaxes each layer's histories have left out since the last call.

    Args:
        layers: the model's layers.
        reported: the results of `left_out` from the last call by name, updated here.
    """
    ours = (layer for _, layer in layers if isinstance(layer, Float8Layer))
    renew_scales(m for m in ours if m.fp8.scaling is not None and m.fp8.scaling.recorded)
    for name, layer in layers:
        if not _leaves_out(layer) or is_paused(layer):
            reported.pop(name, None)  # its histories will start again
            continue
        history = scaling_buffers(layer)[0]
        before = reported.get(name, torch.zeros(len(LEFT_OUT), dtype=torch.float32, device="cpu"))
        counts, reported[name] = left_out(history, before.to(history.device))
        yield f"{name}/history", counts


def _leaves_out(layer: nn.Module) -> bool:
    """Return whether a layer has guarded histories; it may have been reverted meanwhile."""
    if not isinstance(layer, Float8Layer):
        return False
    return layer.fp8.scaling is not None and layer.fp8.scaling.rule.algorithm == "max"


def look_at_saturation(layers: Layers, reported: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield how many operands were beyond the last step's scales since the last call.

    Args:
        layers: the model's layers.
        reported: the number up to the last call, updated here.
    """
    counts = {id(s): s.count for _, layer in layers if (s := _saturation(layer)) is not None}
    if counts:
        total = torch.tensor([sum(counts.values())], dtype=torch.float32, device="cpu")
        yield "graphs", total - reported.get("graphs", torch.zeros_like(total))
        reported["graphs"] = total


def _saturation(layer: nn.Module) -> Saturation | None:
    """Return a layer's counter, shared with others, if graphs cast with the last step's scales."""
    scaling = layer.fp8.scaling if isinstance(layer, Float8Layer) else None
    return None if scaling is None or scaling.rule.eager else scaling.saturation


def look_at_updates(
    layers: Iterable[tuple[str, Any]], optimizers: Iterable[Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the statistics of each weight's next update."""
    places = {
        parameter: (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        if "betas" in group and "eps" in group
        for parameter in group["params"]
    }
    for name, layer in layers:
        weight = layer.weight
        if weight.grad is None or is_released(weight) or weight not in places:
            continue
        optimizer, group = places[weight]
        state: Mapping[str, Any] = optimizer.state.get(weight, {})
        if "exp_avg_sq" not in state:
            continue
        own = {key: local(value) for key, value in state.items() if isinstance(value, Tensor)}
        grad = local(weight.grad)
        grad = grad.dequantize() if isinstance(grad, Float8Grad) else grad.detach()
        grad = grad.reshape(matrix_shape(grad.shape))
        if grad.numel():
            step = own["step"] + 1  # may be on the device; don't wait for it
            beta2, eps = float(group["betas"][1]), float(group["eps"])
            yield f"{name}/update", update_statistics(grad, own, beta2, eps, step)


GatedMLPs = list[tuple[str, nn.Module, GatedMLPSpec]]


def gated_mlps(model: nn.Module) -> GatedMLPs:
    """Return the gated MLPs of a model, of any activation, by names without wrappers."""
    return [
        (unwrapped_name(name), module, spec)
        for name, module, spec in detect_producers.gated_mlps(model)
        if _aligned(module, spec) is not None
    ]


def look_at_gated_mlps(mlps: GatedMLPs) -> Iterator[tuple[str, Tensor]]:
    """Yield the statistics of each gated MLP's weights."""
    for name, module, spec in mlps:
        pair = _aligned(module, spec)
        if pair is not None and pair[0].numel() and pair[0].shape == pair[1].shape:
            yield f"{name}/swiglu", alignment_statistics(*pair)


def _aligned(module: nn.Module, spec: GatedMLPSpec) -> tuple[Tensor, Tensor] | None:
    """Return gate's and up's weights with a row for each channel, or None if unavailable."""
    layers = [getattr(module, name) for name in spec.inputs]
    weights: list[Any] = [getattr(layer, "weight", None) for layer in layers]
    is_trained = all(isinstance(w, nn.Parameter) and w.requires_grad for w in weights)
    if not is_trained or getattr(layers[0], "fp8_transposed", False):
        return None
    if len(weights) == 1 and isinstance(weights[0], DTensor):
        return None  # this rank's rows of gate and up belong to different channels
    tensors = [local(w).detach() for w in weights]
    gate, up = tensors if len(tensors) == 2 else tensors[0].chunk(2)
    return gate, up


def kinds_of(layers: Layers, mlps: GatedMLPs, probes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the measured statistics by ``<qualified layer>/<kind>``, as `Series` expects them."""
    kinds: dict[str, tuple[str, ...]] = {}
    for name, layer in layers:
        clipped = layer.fp8.recipe.grad_output.granularity == "tensorwise"
        searched = clipped and "clip_search" in probes
        kinds[f"{name}/{INPUT}"] = OPERAND
        kinds[f"{name}/{GRAD_OUTPUT}"] = (*OPERAND, *(CLIP if searched else ()))
        if layer.frozen_weight is None:
            kinds[f"{name}/{WEIGHT}"] = OPERAND
        if layer.weight.requires_grad:
            kinds[f"{name}/update"] = UPDATE
        if _leaves_out(layer):
            kinds[f"{name}/history"] = LEFT_OUT
    if any(_saturation(layer) is not None for _, layer in layers):
        kinds["graphs"] = GRAPHS
    kinds |= {f"{name}/swiglu": SWIGLU for name, _, _ in mlps}
    if "logit_sharpness" in probes:
        kinds["logits"] = SHARPNESS
    return kinds
