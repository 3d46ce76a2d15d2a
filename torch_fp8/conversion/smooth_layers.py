"""Search for the down projections of gated MLPs, whose inputs Smooth-SwiGLU scales per channel."""

from collections.abc import Iterable, Iterator

from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.detect_gated_mlp import find_gated_layers
from torch_fp8.nn.class_swap import own_child
from torch_fp8.nn.gated_mlp import Float8GatedMLP, GatedMLPSpec
from torch_fp8.nn.layer_filter import is_linear


def down_projections(model: nn.Module, configs: Iterable[FP8Config]) -> dict[nn.Module, str]:
    """Return the down projections of the gated MLPs of a model, with the names of the MLPs.

    If an adapter wraps such a layer, this is the base layer, PEFT's ``base_layer``.

    Args:
        model: any model.
        configs: configurations of the layers; the result is empty unless one has Smooth-SwiGLU.
    """
    names: dict[nn.Module, str] = {}
    if not any(config.smooth_swiglu for config in configs):
        return names
    for name, module, spec in gated_mlps(model):
        layer = getattr(module, spec.down)
        layer = own_child(layer, "base_layer") or layer
        if layer is not None and is_linear(layer):
            names[layer] = name
    return names


def gated_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module, GatedMLPSpec]]:
    """Yield (name, module, names of its layers) of the gated MLPs, with any activation."""
    for name, module in model.named_modules():
        if isinstance(module, Float8GatedMLP):
            yield name, module, module.fp8.spec
        else:
            spec = find_gated_layers(module)
            if spec is not None:
                yield name, module, spec
