"""Conversion of the modules between FP8 layers: RMSNorms and gated MLPs, which then emit FP8."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from torch_fp8.config import FP8Config
from torch_fp8.conversion.detect_producers import find_gated_mlp, find_rms_norm
from torch_fp8.conversion.layer_options import high_precision_pattern
from torch_fp8.nn.class_swap import add_mixin, own_child, remove_mixin, user_class
from torch_fp8.nn.gated_mlp import MLPFP8, Float8GatedMLP
from torch_fp8.nn.input_group import InputGroup, can_group
from torch_fp8.nn.layer_filter import comes_from_liger, matches
from torch_fp8.nn.layer_norm import SharedFP8, SharedOutput
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.rms_norm import Float8RMSNorm, NormFP8
from torch_fp8.quantization.options import named
from torch_fp8.quantization.scaling import OF_TENSOR
from torch_fp8.tensor.quantizer import Quantizer


class Producers(NamedTuple):
    """The result of `convert_producers`, as qualified names.

    Attributes:
        producers: modules that return FP8.
        unfused: modules that return plain tensors because the next layers cast differently.
        groups: layers of each group that shares the products of backward.
    """

    producers: tuple[str, ...] = ()
    unfused: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()


_NORM = Float8RMSNorm, NormFP8, find_rms_norm
_MLP = Float8GatedMLP, MLPFP8, find_gated_mlp

_OUTPUT = re.compile(r"(o|wo|out|output|dense|proj|c_proj|to_out)(_proj|_lin)?|\d+")
"""Names of the layers that read the result of a block, not its input, although their sizes fit.

Numbered layers read one another's results. A wrong guess changes no result: a reader that is left
out runs alone, and so does a layer in a group that reads something else, although the summary
counts it.
"""


def convert_producers(model: nn.Module, config: FP8Config) -> Producers:
    """Convert the RMSNorms of `model`, and its gated MLPs with an FP8 layer, in place.

    A LayerNorm in front of several FP8 layers returns a tensor that is cast once for all of them.
    All other modules stay as they are, as do modules that `config.skip` matches or an override
    keeps in high precision. If overrides make the layers behind a norm, or those of an MLP, cast
    differently, the norm returns plain tensors and the MLP stays as it is.

    Args:
        model: model whose linear layers are already converted.
        config: configuration of the model.
    """
    converted: list[str] = []
    unfused: list[str] = []
    norms: dict[str, list[list[Float8Layer]]] = {}
    modules = dict(model.named_modules())
    for module in modules.values():
        if isinstance(module, Float8Layer):
            module.fp8.group = None
    for name, module in modules.items():
        if _is_skipped(name, config):
            _revert(module)
            continue
        groups = _layers_beside(module, modules.get(name.rpartition(".")[0]))
        alike = not config.overrides or _cast_alike(layer for group in groups for layer in group)
        if alike and any(len(group) > 1 for group in groups) and share_output(module, name):
            norms[name] = groups
            continue
        if not alike and isinstance(module, SharedOutput):
            _revert(module)
        if _fuse(module, _NORM, name, config, _reading_quantizer(groups) if alike else None):
            norms[name] = groups if alike else []
            (converted if alike else unfused).append(name)
        elif any(isinstance(m, Float8Layer) for m in module.modules()):
            # PEFT wraps a layer as its base_layer.
            bases = [m for c in module.children() for m in (c, own_child(c, "base_layer"))]
            if not config.overrides or _cast_alike(m for m in bases if isinstance(m, Float8Layer)):
                if _fuse(module, _MLP, name, config):
                    converted.append(name)
            elif isinstance(module, Float8GatedMLP) or find_gated_mlp(module) is not None:
                _revert(module)
                unfused.append(name)
    return Producers(tuple(converted), tuple(unfused), _group(modules, norms))


def replaces_ligers(module: nn.Module) -> bool:
    """Return whether a producer computes what Liger Kernel would."""
    forward = vars(module).get("ligers", user_class(type(module)).forward)
    return isinstance(module, (Float8RMSNorm, Float8GatedMLP)) and comes_from_liger(forward)


def _is_skipped(name: str, config: FP8Config) -> bool:
    return any(matches(pattern, name) for pattern in config.skip) or (
        bool(config.overrides) and high_precision_pattern(name, config) is not None
    )


def revert_producers(model: nn.Module) -> None:
    """Give all converted norms and gated MLPs their original class back, in place."""
    for module in model.modules():
        _revert(module)


def _reading_quantizer(groups: Iterable[Sequence[Float8Layer]]) -> Quantizer | None:
    """Return the quantizer with which the FP8 layers of `_layers_beside` cast their input, or None.

    There are no such layers next to the last norm of a model, for example.
    """
    layers = [layer for group in groups for layer in group]
    if not layers:
        return None
    wgrad = any(m.weight.requires_grad and m.fp8.recipe.wgrad is not None for m in layers)
    return Quantizer(layers[0].fp8.recipe.input, OF_TENSOR, columnwise_usage=wgrad)


def _cast_alike(layers: Iterable[Float8Layer]) -> bool:
    """Return whether all layers cast alike, so that the module in front can cast for all of them.

    A frozen layer counts with the recipe that it had before, since frozen layers have their own.
    """
    recipes = set()
    for layer in layers:
        config, frozen = layer.fp8.config, layer.fp8.frozen
        recipe = layer.fp8.recipe if frozen is None else frozen.recipe
        options = [getattr(config, option) for option in (*named(config, "delayed"), "eval_fp8")]
        recipes.add((replace(recipe, smooth=False), *options))
    return len(recipes) <= 1


def _group(
    modules: dict[str, Any], norms: dict[str, list[list[Float8Layer]]]
) -> tuple[tuple[str, ...], ...]:
    """Group the layers that read one input, and return the names of each group's layers.

    gate and up of a converted MLP are a group whose gradients SwiGLU's backward casts.

    Args:
        modules: all modules by name.
        norms: result of `_layers_beside` for each norm whose output is shared, by name.
    """
    of_mlps: set[int] = set()
    known: dict[tuple[int, ...], InputGroup] = {}
    for mlp in [m for m in modules.values() if isinstance(m, Float8GatedMLP)]:
        layers, group = [getattr(mlp, name) for name in mlp.fp8.spec.inputs], None
        key = tuple(map(id, layers))
        of_mlps.update(key)
        if len(layers) > 1 and all(map(_can_share, layers)):
            group = known[key] = InputGroup(layers)
        mlp.fp8 = mlp.fp8._replace(group=group)
    for name, beside in norms.items():
        groups = []
        for layers in beside:
            # Layers that seem to read the norm's output, and can be grouped.
            inputs = (m for m in layers if id(m) not in of_mlps and not _is_output(m.fp8.name))
            readers = [layer for layer in inputs if _can_share(layer)]
            if len(readers) > 1:
                key = tuple(map(id, readers))
                groups.append(known.get(key) or InputGroup(readers))
                known[key] = groups[-1]
        modules[name].fp8.groups = tuple(groups)
    return tuple(tuple(m.fp8.name for m in group.layers) for group in known.values())


def _can_share(layer: nn.Module) -> bool:
    if not isinstance(layer, Float8Layer) or layer.fp8_transposed or layer.fp8.frozen is not None:
        return False
    return can_group(layer.fp8.recipe, layer.out_features)


def find_readers(
    model: nn.Module, layers: Mapping[str, nn.Linear], config: FP8Config
) -> list[tuple[str, ...]]:
    """Return the names of layers that will share a norm's output, before they are converted.

    Args:
        model: model, converted or not.
        layers: layers of `model` that count, by qualified name.
        config: configuration of the model.
    """
    modules, names = dict(model.named_modules()), {layer: name for name, layer in layers.items()}
    readers: dict[str, tuple[str, ...]] = {}
    for name, module in modules.items():
        if _is_skipped(name, config) or not (_is_layer_norm(module) or find_rms_norm(module)):
            continue
        for beside in _layers_beside(module, modules.get(name.rpartition(".")[0]), nn.Linear):
            of_owner = [names[layer] for layer in beside if layer in names]
            free = [n for n in of_owner if n not in readers and not _is_output(n)]
            if len(free) > 1:
                readers.update(dict.fromkeys(free, tuple(free)))
    return list(dict.fromkeys(readers.values()))


def _is_output(name: str) -> bool:
    return _OUTPUT.fullmatch(name.rpartition(".")[2]) is not None


def _layers_beside(
    norm: nn.Module, parent: nn.Module | None, cls: type[Any] = Float8Layer
) -> list[list[Any]]:
    """Return the layers of a class next to `norm` or inside its siblings, a list for each parent.

    Only layers with as many input features as the norm has count.
    """
    weight = norm._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.ndim != 1 or parent is None:
        return []
    beside = [m for m in parent.children() if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    owners = [parent, *(m for child in beside for m in child.modules())]

    def fits(layer: nn.Module) -> bool:
        return isinstance(layer, cls) and layer.in_features == weight.shape[0]

    return [list(filter(fits, owner.children())) for owner in owners]


def _revert(module: Any) -> None:
    for mixin in (SharedOutput, Float8RMSNorm, Float8GatedMLP):
        if isinstance(module, mixin):
            del module.fp8
            remove_mixin(module, mixin)
    if "ligers" in vars(module):
        module.forward = MethodType(vars(module).pop("ligers"), module)


def _fuse(module: Any, kind: Any, name: str, config: FP8Config, *options: Any) -> bool:
    """Convert a module to a producer in place; return False if it computes something else.

    A producer with other attributes than those with which it was converted is tried again.

    Args:
        module: any module.
        kind: `_NORM` or `_MLP`.
        name, config, options: qualified name of the module, its configuration, and what else its
            state consists of.
    """
    mixin, state, find = kind
    formula = module.fp8 if isinstance(module, mixin) else None
    if formula is not None and formula.reads.change(module) is not None:
        _revert(module)
        formula = None
    if formula is None:
        formula = find(module)
        if formula is None:
            return False
        add_mixin(module, mixin)
        if "forward" in vars(module):  # Liger Kernel's
            module.ligers = vars(module).pop("forward").__func__
    module.fp8 = state(name, config, formula.spec, formula.reads, *options)
    return True


def share_output(module: Any, name: str) -> bool:
    """Let a LayerNorm share one cast of its output among its readers, in place.

    A LayerNorm is a module with a weight (C,) and "LayerNorm" in the name of its class, because
    Hugging Face has too many such classes for a list. Return False if the module is not one.
    """
    if not isinstance(module, SharedOutput):
        if not _is_layer_norm(module):
            return False
        add_mixin(module, SharedOutput)
    module.fp8 = SharedFP8(name)
    return True


def _is_layer_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    is_norm = weight is not None and weight.ndim == 1 and "LayerNorm" in type(module).__name__
    return is_norm and not any(True for _ in module.children()) and "forward" not in module.__dict__
