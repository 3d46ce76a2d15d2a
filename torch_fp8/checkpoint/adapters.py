"""Folding of PEFT adapters, and of Smooth-SwiGLU's factors, into weights, one module at a time.

``dequant(W) + delta`` is added in float32 and rounded to BF16 once, as in a merge; the base is only
read. PEFT's layers are recognized by their attributes, ``base_layer`` and ``get_delta_weight``, so
PEFT is not imported.

Smooth-SwiGLU is folded into exported weights as ``up <- s up``, ``down <- down / s``. A training
checkpoint has the weights without s, and each forward computes s from its tokens. An inference
engine does not; its activations would have the outliers that training never cast. So an export
contains the factors of the last forward in the weights, row by row in the up projection and column
by column in the down projection. They are powers of two, so the function is the same, and the FP8
codes of the down projection are those of that forward.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.conversion.detect_producers import gated_mlps
from torch_fp8.nn.class_swap import own_child, unwrapped_name
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.smooth import smooth_factors
from torch_fp8.quantization.wording import check_choice
from torch_fp8.tensor.base import dequantized

ADAPTERS = ("merge", "apart")
"""The treatments of adapters: fold them into the weights, or leave them out."""

_NOT_ADDED = {"use_dora": "DoRA", "lora_bias": "lora_bias=True"}
"""PEFT options, with names for messages, whose adapters change more than the weight, or not by
addition.
"""


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper of a layer, or of a trained copy of one."""
    return not {"base_layer", "original_module"}.isdisjoint(dict(module.named_children()))


def adapted_layers(model: nn.Module) -> list[str]:
    """Return the qualified names of the layers that have adapters."""
    return [unwrapped_name(name) for name, m in model.named_modules() if is_adapted(m)]


def why_not_folded(model: nn.Module) -> str | None:
    """Return why a model's adapters are not matrices added to weights, or None if they are."""
    for name, module in model.named_modules():
        if own_child(module, "base_layer") is None:
            continue
        if not callable(getattr(module, "get_delta_weight", None)):
            return f"'{unwrapped_name(name)}' is a {type(module).__name__}"
        for option, what in _NOT_ADDED.items():
            if any((getattr(module, option, None) or {}).values()):
                return f"'{unwrapped_name(name)}' has {what}"
    return None


def refuse_prompts(model: nn.Module) -> None:
    """Refuse a PEFT model whose adapter is not part of a layer.

    Args:
        model: the model, possibly inside wrappers.
    Raises:
        ValueError: it learns a prompt, or a prefix of the cache.
    """
    for module in model.modules():
        if own_child(module, "prompt_encoder"):
            raise ValueError(
                f"the {type(module).__name__} learns a prompt, which is not part of a weight, so "
                "no FP8 checkpoint can store it; adapters='apart' writes only the base, for an "
                "engine that also serves the prompt, which model.save_pretrained writes"
            )


class AdapterFold:
    """Reads a model's weights with its active adapters folded in, or without any adapters.

    Args:
        model: the model inside PEFT's wrapper.
        merge: whether adapters are folded in.
    Attributes:
        wrappers: PEFT's wrappers of adapted layers, and of layers with trained copies.
    Raises:
        ValueError: an adapter is already merged, provides no delta, or belongs to one of several
            layers that share a weight.
    """

    def __init__(self, model: nn.Module, merge: bool) -> None:
        self._merge = merge
        self._owners: dict[tuple[int, str], tuple[str, Any]] = {}
        adapted = {name: module for name, module in model.named_modules() if is_adapted(module)}
        self.wrappers = {*adapted.values()}
        for name, module in adapted.items():
            if own_child(module, "base_layer") is None:
                continue
            name = unwrapped_name(name)
            if getattr(module, "merged", False):
                raise ValueError(
                    f"the adapter of '{name}' is already merged; call unmerge_adapter(), or "
                    "merge_and_unload() and export the model it returns"
                )
            if merge and not callable(getattr(module, "get_delta_weight", None)):
                raise ValueError(
                    f"'{name}' is a {type(module).__name__}, whose adapter is not a matrix added "
                    "to the weight; call merge_and_unload() and export the model it returns"
                )
            parameter = getattr(module, "parameter_name", "weight")
            self._owners[id(_innermost(module)), parameter] = name, module
        if merge and adapted:
            self._refuse_tied(model)

    def _refuse_tied(self, model: nn.Module) -> None:
        """Refuse adapters that turn a tied weight into two: engines tie them, and lose one."""
        chosen = dict(self.walk(model))
        sharing: dict[int, dict[int, str]] = {}
        for name, module in AdapterFold(model, merge=False).walk(model):
            weight = module._parameters.get("weight")
            if weight is not None:
                sharing.setdefault(id(weight), {}).setdefault(id(module), name)
        for names in (list(group.values()) for group in sharing.values() if len(group) > 1):
            now = {id(chosen[name]._parameters.get("weight")) for name in names}
            adapted = [name for name in names if self._active(chosen[name])]
            if len(now) > 1 or adapted:
                first = adapted[0] if adapted else names[-1]
                other = next(name for name in names if name != first)
                raise ValueError(
                    f"'{first}' has an adapter, or is trained as a copy, and shares its weight "
                    f"with '{other}', which engines tie to it (tie_word_embeddings): merging would "
                    "make the two differ. Train adapters on other layers, or a model with untied "
                    "weights; adapters='apart' leaves this one out"
                )

    def walk(self, model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Yield every module under the name that it has without adapters."""
        if not self.wrappers:
            modules = model.named_modules(remove_duplicate=False)
            yield from [(unwrapped_name(name), module) for name, module in modules]
            return
        if model in self.wrappers and own_child(model, "base_layer") is not None:
            model = _innermost(model)
        elif model in self.wrappers:
            wrapper: Any = model
            active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
            is_copy = self._merge and active
            model = wrapper.modules_to_save[active[0]] if is_copy else wrapper.original_module
        yield unwrapped_name(prefix), model
        for name, part in model.named_modules(remove_duplicate=False):
            if name and "." not in name:  # a child, under each of its names
                yield from self.walk(part, f"{prefix}.{name}".lstrip("."))

    @torch.no_grad()
    def __call__(self, layer: nn.Module, weight: Tensor, parameter: str = "weight") -> Tensor:
        """Return a layer's weight with its adapters, or as it is stored if it has none.

        A weight with adapters is BF16 if the layer runs in FP8, and else has its own dtype. On the
        meta device nothing is added, because a delta has values.

        Args:
            layer: the layer.
            weight: the weight, plain or frozen; it is not changed.
            parameter: the layer's name for the weight.
        """
        active = self._active(layer, parameter)
        if not active:
            return weight
        dtype = torch.bfloat16 if isinstance(layer, RunsFP8) else weight.dtype
        if weight.is_meta:
            return weight.to(dtype)
        name, module = self._owners[id(layer), parameter]
        folded = dequantized(weight).detach().float()
        for adapter in active:
            delta = module.get_delta_weight(adapter)
            others = [
                what
                for option, what in _NOT_ADDED.items()
                if (getattr(module, option, None) or {}).get(adapter, False)
            ]
            if delta.shape != folded.shape or others:
                raise ValueError(
                    f"the adapter {adapter!r} of '{name}' does more than add to the weight "
                    f"({', '.join(others) or 'DoRA'}); call merge_and_unload() and export the "
                    "model it returns"
                )
            folded = folded + delta.float()
        return folded.to(dtype)

    def _active(self, layer: nn.Module, parameter: str = "weight") -> list[str]:
        """Return the adapters to fold into a weight of a layer."""
        owner = self._owners.get((id(layer), parameter)) if self._merge else None
        if owner is None or owner[1].disable_adapters:
            return []
        module = owner[1]
        # The same check as in PEFT's merge.
        held = [getattr(module, name) for name in module.adapter_layer_names]
        return [name for name in module.active_adapters if any(name in each for each in held)]


def fold_of(model: nn.Module, root: nn.Module, adapters: str) -> AdapterFold:
    """Return the fold of the adapters of `root`, which is `model` inside wrappers.

    Raises:
        ValueError: `adapters` is unknown, or an adapter cannot be folded into weights.
    """
    check_choice("adapters", adapters, ADAPTERS)
    if adapters == "merge":
        refuse_prompts(model)
    return AdapterFold(root, merge=adapters == "merge")


def _innermost(wrapper: Any) -> nn.Module:
    """Return the layer inside wrappers; experts have nested wrappers, one for each weight."""
    layer: nn.Module = wrapper
    while (inner := own_child(layer, "base_layer")) is not None:
        layer = inner
    return layer


class _Factors(NamedTuple):
    """Factors of a weight (N, K): of an up projection's rows, or a down projection's columns."""

    values: Tensor
    channels: Tensor | None = None
    """The amaxes (K,) of a down projection's input."""


class SmoothFold:
    """The factors of a model's gated MLPs, from their last forwards; none without a model.

    It skips MLPs in which a layer does not run in FP8 or has an adapter, or whose up projection has
    a bias, and MLPs of which only compiled forwards have run, because these store no factors.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._factors: dict[object, _Factors] = {}
        layers = [] if model is None else [m for m in model.modules() if isinstance(m, Float8Layer)]
        if model is None or not [m for m in layers if m.fp8.recipe.smooth]:
            return
        for _, module, spec in gated_mlps(model):
            up = getattr(module, spec.inputs[-1])  # or one layer for gate and up
            down = getattr(module, spec.down)
            if not (isinstance(up, Float8Layer) and isinstance(down, Float8Layer)):
                continue
            channels = None if down.fp8.channels is None else down.fp8.channels.amax
            if channels is None or up.bias is not None or not down.fp8.recipe.smooth:
                continue
            s, inverse, _ = smooth_factors(channels)
            rows = s
            if len(spec.inputs) == 1:
                parts = (torch.ones_like(s), s)
                rows = torch.cat(parts if spec.gate_first else parts[::-1])
            self._factors[up] = _Factors(rows)
            self._factors[down] = _Factors(inverse, channels)

    def __contains__(self, layer: object) -> bool:
        return layer in self._factors

    def weight(self, layer: Any, weight: Tensor) -> Tensor:
        """Return a stored weight with the factors of its FP8 layer, if that has any."""
        factors = self._factors.get(layer)
        if factors is None:
            return weight
        weight = dequantized(weight)
        values, by_row = factors.values.to(weight.device), factors.channels is None
        folded = weight.float() * (values[:, None] if by_row != layer.fp8.transposed else values)
        return folded.to(weight.dtype)

    def input_scale(self, layer: Float8Layer, scale: Tensor) -> Tensor:
        """Return delayed scaling's scale () of a layer's input with its factors.

        Args:
            layer: the layer.
            scale: the input's scale for the largest input in the history. The largest value is
                assumed to be in the channel that was the largest in the last forward.
        """
        factors = self._factors.get(layer)
        if factors is None or factors.channels is None:
            return scale
        channels = factors.channels
        s, _, largest = smooth_factors(channels)
        relative = torch.maximum(largest / channels.amax(), s[channels.argmax()])
        return scale * relative.to(scale.device)
