"""Conversion of the modules between FP8 layers that emit FP8: RMSNorms and gated MLPs."""

from torch import nn

import torch_fp8.compile.delayed_quantize_fusion  # noqa: F401, where there are producers
from torch_fp8.autograd.function import as_text
from torch_fp8.config import FP8Config
from torch_fp8.conversion.detect_gated_mlp import gated_mlp_spec
from torch_fp8.conversion.detect_rms_norm import rms_norm_spec
from torch_fp8.nn.class_swap import add_mixin, remove_mixin
from torch_fp8.nn.gated_mlp import Float8GatedMLP, other_modules
from torch_fp8.nn.layer_filter import matches
from torch_fp8.nn.layer_norm import SharedOutput
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.rms_norm import Float8RMSNorm
from torch_fp8.nn.scaling_buffers import INPUT
from torch_fp8.tensor.quantizer import Quantizer


def convert_producers(model: nn.Module, config: FP8Config) -> tuple[str, ...]:
    """Convert the RMSNorms of `model`, and the gated MLPs that have an FP8 layer, in place.

    LayerNorms in front of several FP8 layers return a tensor that is cast once for all of them.
    Modules that `config.skip` names, and all others, stay as they are.

    Args:
        model: a model whose linear layers are converted already.
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
        if convert_rms_norm(module, name, config, _reading_quantizer(module, parent)) or (
            any(isinstance(m, Float8Layer) for m in module.modules())
            and convert_gated_mlp(module, name, config)
        ):
            converted.append(name)
    return tuple(converted)


def revert_producers(model: nn.Module) -> None:
    """Turn all of them back into their original classes, in place."""
    for module in model.modules():
        _revert(module)


def _reading_quantizer(norm: nn.Module, parent: nn.Module | None) -> Quantizer | None:
    """Return how the FP8 layers cast their input that are beside `norm` or inside its siblings, and
    take as many features as it has.

    The last norm of a model, beside the list of its layers, has none: its output is the model's.
    """
    groups = _layers_beside(norm, parent)
    layers = [layer for group in groups for layer in group]
    if not layers:
        return None
    wgrad = any(m.weight.requires_grad and m.fp8_recipe.wgrad is not None for m in layers)
    spec, config = layers[0].operand_spec(INPUT), layers[0].fp8_config
    return Quantizer(spec, config, columnwise_usage=wgrad)


def _is_shared(norm: nn.Module, parent: nn.Module | None) -> bool:
    """Return whether some module among the norm's siblings has several such layers, as q, k and
    v.
    """
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


def convert_rms_norm(
    module: nn.Module, name: str, config: FP8Config, quantizer: Quantizer | None
) -> bool:
    """Convert an RMSNorm to a `Float8RMSNorm`, in place; return False, unchanged, if it is none.

    Args:
        name: the qualified name of the module.
        config: the options of the norm.
        quantizer: of the FP8 layers that read its output; None: it returns plain tensors at once.
    """
    if not isinstance(module, Float8RMSNorm):
        spec = rms_norm_spec(module)
        if spec is None:
            return False
        add_mixin(module, Float8RMSNorm)
        assert isinstance(module, Float8RMSNorm)
        module.fp8_spec = spec
    module.fp8_config, module.fp8_name, module.fp8_quantizer = config, name, quantizer
    module.fp8_casts, module.fp8_reader = as_text(quantizer), None
    return True


def revert_rms_norm(module: Float8RMSNorm) -> None:
    """Undo `convert_rms_norm`."""
    for name in ("fp8_config", "fp8_name", "fp8_spec", "fp8_quantizer", "fp8_casts", "fp8_reader"):
        delattr(module, name)
    remove_mixin(module, Float8RMSNorm)


def convert_gated_mlp(module: nn.Module, name: str, config: FP8Config) -> bool:
    """Convert a gated MLP to a `Float8GatedMLP`, in place; return False, unchanged, if it is none.

    An MLP is converted only if one of its layers runs in FP8.
    """
    if not isinstance(module, Float8GatedMLP):
        spec = gated_mlp_spec(module)
        if spec is None:
            return False
        add_mixin(module, Float8GatedMLP)
        assert isinstance(module, Float8GatedMLP)
        module.fp8_spec, module.fp8_activation = spec, other_modules(module, spec)
    module.fp8_config, module.fp8_name = config, name
    return True


def revert_gated_mlp(module: Float8GatedMLP) -> None:
    """Undo `convert_gated_mlp`."""
    for name in ("fp8_config", "fp8_name", "fp8_spec", "fp8_activation"):
        delattr(module, name)
    remove_mixin(module, Float8GatedMLP)


def share_output(module: nn.Module, name: str) -> bool:
    """Let a LayerNorm, Hugging Face's own ones included, share its output, in place.

    Known by one weight (C,), maybe a bias, and "LayerNorm" in its class's name, of which there are
    too many for a list. False, and nothing done, if it is none.
    """
    if not isinstance(module, SharedOutput):
        weight = module._parameters.get("weight")
        is_norm = weight is not None and weight.ndim == 1 and "LayerNorm" in type(module).__name__
        if not is_norm or module._modules or "forward" in module.__dict__:
            return False
        add_mixin(module, SharedOutput)
        assert isinstance(module, SharedOutput)
    module.fp8_name = name
    return True


def keep_output(module: SharedOutput) -> None:
    """Undo `share_output`."""
    del module.fp8_name
    remove_mixin(module, SharedOutput)
