"""The modules between FP8 layers that hand over FP8: RMSNorms and gated MLPs, found in a model."""

from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.float8_rms_norm import Float8RMSNorm, convert_rms_norm, revert_rms_norm
from torch_fp8.gated_mlp import Float8GatedMLP, convert_gated_mlp, revert_gated_mlp
from torch_fp8.linear import Float8Linear
from torch_fp8.selection import matches


def convert_producers(model: nn.Module, config: FP8Config) -> tuple[str, ...]:
    """Convert the RMSNorms of `model`, and the gated MLPs that have an FP8 layer, in place.

    Modules that `config.skip` names, and what is neither, stay as they are.

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
        if convert_rms_norm(module, name, config, feeds=_feeds(module, parent)) or (
            any(isinstance(m, Float8Linear) for m in module.modules())
            and convert_gated_mlp(module, name, config)
        ):
            converted.append(name)
    return tuple(converted)


def revert_producers(model: nn.Module) -> None:
    """Turn them all back into the classes that they came from, in place."""
    for module in model.modules():
        _revert(module)


def _feeds(norm: nn.Module, parent: nn.Module | None) -> bool:
    """Whether an FP8 layer that takes as many features as `norm` has stands beside it.

    Not so for the last norm of a model, beside the list of its layers: that one's output is the
    model's.
    """
    weight = norm._parameters.get("weight")
    if weight is None or parent is None:
        return False
    beside = (m for m in parent.children() if not isinstance(m, (nn.ModuleList, nn.ModuleDict)))
    layers = (m for child in beside for m in child.modules() if isinstance(m, Float8Linear))
    return any(layer.in_features == weight.shape[0] for layer in layers)


def _revert(module: nn.Module) -> None:
    if isinstance(module, Float8RMSNorm):
        revert_rms_norm(module)
    elif isinstance(module, Float8GatedMLP):
        revert_gated_mlp(module)
