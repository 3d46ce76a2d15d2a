"""Which layers cast their input with scales per channel: the down projections of gated MLPs."""

from collections.abc import Iterable, Iterator

from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.detect_gated_mlp import gated_mlp_spec
from torch_fp8.nn.gated_mlp import Float8GatedMLP, FusedGateUpSpec, GatedMLPSpec
from torch_fp8.nn.layer_filter import is_linear


def down_projections(model: nn.Module, configs: Iterable[FP8Config]) -> dict[nn.Module, str]:
    """Return the linear layers behind the product of a gated MLP, and the names of the MLPs.

    Of an adapter around such a layer it is the base, PEFT's ``base_layer``.

    Args:
        configs: the layers' configurations; nothing is done unless one asks for Smooth-SwiGLU.
    """
    names: dict[nn.Module, str] = {}
    if not any(config.smooth_swiglu for config in configs):
        return names
    for name, module, spec in gated_mlps(model):
        layer = getattr(module, spec.down)
        layer = layer._modules.get("base_layer", layer)
        if layer is not None and is_linear(layer):
            names[layer] = name
    return names


def gated_mlps(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, GatedMLPSpec | FusedGateUpSpec]]:
    """Yield the gated MLPs of a model, of any activation, with the names of their layers."""
    for name, module in model.named_modules():
        spec: GatedMLPSpec | FusedGateUpSpec | None
        if isinstance(module, Float8GatedMLP):
            spec = module.fp8.spec
        else:
            spec = gated_mlp_spec(module, any_activation=True)
        if spec is not None:
            yield name, module, spec
