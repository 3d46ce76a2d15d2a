"""The modules between FP8 layers that hand over FP8: RMSNorms and gated MLPs, found in a model."""

from torch import nn

import torch_fp8.traced_delayed_casts  # noqa: F401, where there are producers
from torch_fp8.config import FP8Config
from torch_fp8.float8_rms_norm import Consumers, Float8RMSNorm, convert_rms_norm, revert_rms_norm
from torch_fp8.gated_mlp import Float8GatedMLP, convert_gated_mlp, revert_gated_mlp
from torch_fp8.linear import INPUT, Float8Layer
from torch_fp8.selection import matches
from torch_fp8.shared_output import SharedOutput, keep_output, share_output


def convert_producers(model: nn.Module, config: FP8Config) -> tuple[str, ...]:
    """Convert the RMSNorms of `model`, and the gated MLPs that have an FP8 layer, in place.

    LayerNorms in front of several FP8 layers return a tensor that is cast once for all of them.
    Modules that `config.skip` names, and all others, stay as they are.

    Args:
        model: whose linear layers are converted already.
    Returns:
        The qualified names of the modules converted.
    """
    converted = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if any(matches(pattern, name) for pattern in config.skip):
            _revert(module)
            continue
        parent = modules.get(name.rpartition(".")[0])
        if _is_shared(module, parent) and share_output(module, name):
            continue
        if convert_rms_norm(module, name, config, _consumers(module, parent)) or (
            any(isinstance(m, Float8Layer) for m in module.modules())
            and convert_gated_mlp(module, name, config)
        ):
            converted.append(name)
    return tuple(converted)


def revert_producers(model: nn.Module) -> None:
    """Turn them all back into the classes that they came from, in place."""
    for module in model.modules():
        _revert(module)


def _consumers(norm: nn.Module, parent: nn.Module | None) -> Consumers | None:
    """The FP8 layers beside `norm`, or within what is, that take as many features as it has.

    Not so for the last norm of a model, beside the list of its layers: that one's output is the
    model's.
    """
    groups = _layers_beside(norm, parent)
    layers = [layer for group in groups for layer in group]
    if not layers:
        return None
    wgrad = any(m.weight.requires_grad and m.fp8_recipe.wgrad is not None for m in layers)
    return Consumers(layers[0].operand_spec(INPUT), wgrad)


def _is_shared(norm: nn.Module, parent: nn.Module | None) -> bool:
    """Whether some module there has several such layers, as q, k and v."""
    return any(len(group) > 1 for group in _layers_beside(norm, parent))


def _layers_beside(norm: nn.Module, parent: nn.Module | None) -> list[list[Float8Layer]]:
    weight = norm._parameters.get("weight")
    if weight is None or weight.ndim != 1 or parent is None:
        return []
    beside = [m for m in parent.children() if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    owners = [parent, *(m for child in beside for m in child.modules())]
    return [
        [
            layer
            for layer in owner.children()
            if isinstance(layer, Float8Layer) and layer.in_features == weight.shape[0]
        ]
        for owner in owners
    ]


def _revert(module: nn.Module) -> None:
    if isinstance(module, SharedOutput):
        keep_output(module)
    elif isinstance(module, Float8RMSNorm):
        revert_rms_norm(module)
    elif isinstance(module, Float8GatedMLP):
        revert_gated_mlp(module)
