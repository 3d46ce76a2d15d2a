"""Conversion of output layers, whose loss then needs no memory for logits."""

from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.layer_options import high_precision_pattern, layer_options
from torch_fp8.nn.class_swap import remove_mixin
from torch_fp8.nn.deferred_logits import restore_forwards
from torch_fp8.nn.layer_filter import (
    high_precision_modules,
    is_ligers,
    matches,
    output_layer,
    quantized_by,
)
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.linear_form import computes_linear
from torch_fp8.nn.output_layer import OutputLayer, add_loss_head

FEWEST_CLASSES = 4096
"""Classes of the smallest converted layer; smaller logits cost less than their chunks."""
_DEFAULT = "lm_head"
_OF_PRODUCTS = ("recipe", "wgrad", "grad_format", "fast_accum")
_LIBRARIES = {"liger": "Liger Kernel", "trl": "TRL"}
"""Libraries with losses of their own, by the results of `convert_output_layers`."""
_BLOCKS = (nn.ModuleList, nn.ModuleDict)


def convert_output_layers(
    model: nn.Module, config: FP8Config, frozen: Container[str] = ()
) -> dict[str, str]:
    """Convert the output layers of `model` in place.

    An output layer is what ``get_output_embeddings`` of a model returns, a linear layer that shares
    its weight with an embedding, or else the model's last linear layer if it is outside of repeated
    blocks. Layers with fewer than 4,096 classes stay as they are, as do layers that a pattern of
    `config.skip` other than ``lm_head`` names, or an override to high precision or to products
    other than the model's.

    Args:
        model: model whose linear layers are already converted.
        config: configuration of the model.
        frozen: names of the layers that run in FP8 because their weights are frozen.
    Returns:
        How the loss of each layer is computed, by the layer's qualified name: in ``bf16`` or
        ``fp8``, or by ``liger`` or ``trl`` (these libraries, in the model's forward).
    """
    if config.loss_head == "off" or config.backend != "torch":
        return {}
    others, heads = _fused_by_others(model), {}
    for name, module in find_output_layers(model).items():
        named = any(p != _DEFAULT and matches(p, name) for p in config.skip)
        if named or high_precision_pattern(name, config) or _has_own_products(name, config):
            continue
        if module in others:
            heads[name] = others[module]
            continue
        if not (isinstance(module, Float8Layer) or _is_plain_linear(module)):
            continue
        add_loss_head(module, name, model, was_frozen=name in frozen)
        heads[name] = "fp8" if isinstance(module, Float8Layer) else "bf16"
    return heads


def frozen_output_layers(model: nn.Module, config: FP8Config) -> dict[str, Any]:
    """Return the output layers that ``loss_head="auto"`` runs in FP8, by qualified name.

    Their weights are frozen, and other parameters of the model are trained: a model that trains
    nothing is often the reference of a trained one, whose output layer it has to match. Layers that
    already run in FP8 stay there as long as their weights are frozen. Liger Kernel's and TRL's
    losses read the weight, and read it in BF16.
    """
    if config.loss_head != "auto" or config.backend != "torch":
        return {}
    trains = any(p.requires_grad for p in model.parameters())
    others = _fused_by_others(model)
    return {
        name: module
        for name, module in find_output_layers(model).items()
        if not module.weight.requires_grad and (trains or isinstance(module, Float8Layer))
        if module not in others
    }


def loss_head_lines(heads: Mapping[str, str], config: FP8Config) -> Iterator[str]:
    """Yield lines of the start-up summary.

    Args:
        heads: result of `convert_output_layers`.
        config: configuration of the model.
    """
    for name, kind in heads.items():
        text = f"cross entropy in chunks, products in {kind.upper()}, without logits in memory"
        if kind in _LIBRARIES:
            products = "four products, one of them again in backward" if kind == "trl" else "three"
            text = (
                f"{_LIBRARIES[kind]}'s own loss, in chunks and in high precision ({products}); "
                f"loss_head={config.loss_head!r} does not apply to it"
            )
        yield f"  loss head {name}: {text}"


def output_layer_rules(
    model: nn.Module, config: FP8Config
) -> tuple[tuple[str, ...], dict[Any, tuple[str, ...]], dict[Any, str]]:
    """Return the rules for layers that stay in high precision.

    Returns:
        the patterns of `config.skip` that count for all layers; those that count for each frozen
        output layer; and the reasons why output layers stay whatever their names. If another
        library's loss reads the weight, generation then computes the logits that are trained.
    """
    without = tuple(pattern for pattern in config.skip if pattern != _DEFAULT)
    skip = without if config.loss_head == "fp8" else config.skip
    frozen = dict.fromkeys(frozen_output_layers(model, config).values(), without)
    reasons: dict[Any, str] = dict(high_precision_modules(model, skip))
    for head in frozen:
        reasons.pop(head, None)
    for head, kind in _fused_by_others(model).items():
        reasons[head] = f"{_LIBRARIES[kind]}'s loss reads its weight"
    return skip, frozen, reasons


def _fused_by_others(model: nn.Module) -> dict[Any, str]:
    """Return the library, ``trl`` or ``liger``, of each output layer whose loss it computes."""
    return {
        output_layer(module): "trl" if _is_trls(module) else "liger"
        for module in model.modules()
        if is_ligers(module) or _is_trls(module)
    }


def _is_trls(module: nn.Module) -> bool:
    """Return whether TRL has given a model its fused output layer, with the original's metadata."""
    code = getattr(getattr(vars(module).get("forward"), "__func__", None), "__code__", None)
    return code is not None and code.co_name == "_fused_forward"


def revert_output_layers(model: nn.Module) -> None:
    """Give all converted output layers their class back, in place."""
    restore_forwards(model)
    for module in model.modules():
        if isinstance(module, OutputLayer):
            del module.loss_head
            remove_mixin(module, OutputLayer)


def find_output_layers(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers before a loss with at least 4,096 classes, by qualified name."""
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    known = high_precision_modules(model, (_DEFAULT,))
    named = {name: module for name, module in linears.items() if module in known}
    if not named and linears:
        name, module = list(linears.items())[-1]
        owners = [model.get_submodule(name[:i]) for i, c in enumerate(name) if c == "."]
        if not any(isinstance(owner, _BLOCKS) for owner in owners):
            named = {name: module}
    return {n: m for n, m in named.items() if m.out_features >= FEWEST_CLASSES}


def _has_own_products(name: str, config: FP8Config) -> bool:
    """Return whether an override gives a layer products that the loss would not run."""
    own = layer_options([name], config).get(name, config)
    return any(getattr(own, option) != getattr(config, option) for option in _OF_PRODUCTS)


def _is_plain_linear(module: nn.Linear) -> bool:
    """Return whether a layer computes ``x w^T + b`` by its class, without a forward of its own."""
    is_unchanged = "forward" not in vars(module) and quantized_by(module) is None
    return is_unchanged and computes_linear(module)
