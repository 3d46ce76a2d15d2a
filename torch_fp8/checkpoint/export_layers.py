"""Which FP8 layers and experts a format, and the engines that read it, can hold in FP8.

A refusal is a ValueError that names the layer and a way out.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.checkpoint.formats import FileFormat
from torch_fp8.checkpoint.names import StoredPart, is_left_by_quantizers
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.layer_filter import ROUTER_NAMES
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.output_layer import OutputLayer
from torch_fp8.nn.transformer_engine import TransformerEngineLinear
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.tensor.frozen_payload import FROZEN_BLOCK

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Groups of layers whose weights engines fuse: either all of them are in FP8, or none."""


def held_layers(
    model: nn.Module,
    layers: dict[str, Float8Layer],
    linears: Collection[str],
    heads: Collection[nn.Module],
    format: FileFormat,
) -> dict[str, str]:
    """Return for each FP8 layer why it cannot be written in FP8, or an empty string if it can.

    Args:
        model: the transformers model, whose configuration has the numbers of heads.
        layers: the FP8 layers by name.
        linears: the names of all linear layers.
        heads: the output layers.
        format: the format of the export.
    """
    held = {}
    for name, layer in layers.items():
        reason = _size_reason(format, layer.out_features, layer.in_features)
        if layer.fp8.transposed:
            reason = "engines read Conv1D weights in 16 bits"
        elif layer in heads:
            reason = "engines keep the output layer in 16 bits"
        elif format.name == "fine-grained" and is_left_by_quantizers(model, name):
            reason = "transformers keeps it in high precision"
        elif not reason and format.block == FROZEN_BLOCK:
            sizes = _stacked_sizes(name, layer, getattr(model, "config", None))
            if any(size % 128 for size in sizes):
                reason = f"its parts have {sizes} rows, which are not multiples of 128"
        held[name] = reason
    for name in list(held):
        parent, _, leaf = name.rpartition(".")
        for group in FUSED:
            if held[name] or leaf not in group:
                continue
            others = [f"{parent}.{other}".lstrip(".") for other in group if other != leaf]
            high = [other for other in others if other in linears and held.get(other, "not FP8")]
            if high:
                held[name] = f"engines multiply it together with '{high[0]}', which is not in FP8"
    return held


def _size_reason(format: FileFormat, rows: int, cols: int) -> str:
    """Return why a weight (rows, cols) cannot be stored in FP8; an empty string if it can.

    transformers derives the blocks from the shape of the scales, so blocks must divide the weight.
    """
    height, width = format.block
    if height > 1 and (rows % height or cols % width):
        return f"its sides, {rows} x {cols}, are not multiples of {height}"
    if height == 1 and width and cols % width:
        return f"its {cols} input features are not a multiple of {width}"
    return ""


def _stacked_sizes(name: str, layer: Float8Layer, config: Any) -> list[int]:
    """Return the numbers of rows of a fused layer's parts."""
    rows, leaf = layer.out_features, name.rpartition(".")[2]
    if leaf == "gate_up_proj":
        return [rows // 2, rows - rows // 2]
    heads = getattr(config, "num_attention_heads", None)
    if leaf != "qkv_proj" or not heads:
        return [rows]
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or rows // (heads + 2 * of_keys)
    return [heads * size, of_keys * size, rows - (heads + of_keys) * size]


def held_experts(
    name: str, module: nn.Module, parts: Mapping[str, Sequence[StoredPart]], format: FileFormat
) -> str:
    """Return why fused weights of experts cannot be written in FP8, or "" if they can.

    Args:
        name: the module's qualified name.
        module: the experts, in FP8 or in high precision.
        parts: the checkpoint's tensors for each fused weight (E, R, C), by the weight's name.
        format: the format of the export.
    Raises:
        ValueError: the experts run in FP8, but checkpoints do not split them by expert.
    """
    if not isinstance(module, Float8Experts):
        return "not in FP8"
    for key, of_key in parts.items():
        if any(part.expert is None for part in of_key):
            raise ValueError(
                f"'{key}' holds the experts of '{name}' in one tensor, also in checkpoints, and "
                "engines read such experts in 16 bits or in their own formats; save the model with "
                "save_pretrained"
            )
    if format.block not in ((1, 0), FROZEN_BLOCK):
        return (
            f"experts run with one scale per row, which {format.recipe} cannot express; recipe "
            "'rowwise' or 'blockwise' writes them in FP8"
        )
    for key, of_key in parts.items():
        cols = module.get_parameter(key.rpartition(".")[2]).shape[2]
        for part in of_key:
            if reason := _size_reason(format, part.end - part.begin, cols):
                return reason
    return ""


def ignored_experts(parts: Mapping[str, Sequence[StoredPart]], format: FileFormat) -> list[str]:
    """Return the names that tell an engine that experts with these `parts` are not in FP8."""
    first = next(iter(parts.values()))[0]
    if first.expert is None:
        return []
    prefix = first.name.rpartition(f".{first.expert}.")[0]
    of_each = [f"re:{re.escape(prefix)}[.].*"] * (format.name == "compressed-tensors")
    return [prefix, *of_each]


def with_routers(
    ignored: Iterable[str], experts: Iterable[str], parts: Mapping[str, Sequence[StoredPart]]
) -> list[str]:
    """Return the names of modules that are not in FP8, including the routers of experts.

    A router that is not a linear layer in transformers is one in engines. A module also appears
    under its name in checkpoints if that differs.

    Args:
        ignored: the names of linear layers that are not in FP8.
        experts: the names of the modules with fused weights of experts.
        parts: the checkpoint's tensors for each tensor of the model.
    """
    names = list(ignored)
    for name in experts:
        parent = name.rpartition(".")[0]
        beside = (f"{parent}.{router}".lstrip(".") for router in ROUTER_NAMES)
        names += [router for router in beside if f"{router}.weight" in parts]
    stored = [
        parts[f"{n}.weight"][0].name.removesuffix(".weight")
        for n in names
        if f"{n}.weight" in parts
    ]
    return list(dict.fromkeys([*names, *stored]))


_NAN_BITS = 0x7F


def one_recipe(layers: dict[str, Float8Layer], format: str) -> str:
    """Return the recipe that all FP8 layers share; refuse a model with none or several."""
    if not layers:
        raise ValueError(
            "the model has no FP8 layer; call torch_fp8.convert_to_float8(model, recipe) first"
        )
    first: dict[str, str] = {}
    for name, layer in layers.items():
        if isinstance(layer, TransformerEngineLinear):
            raise ValueError(
                f"'{name}' is cast by Transformer Engine, whose FP8 bytes are not accessible; "
                "convert the model with FP8Config(backend='torch')"
            )
        first.setdefault(layer.fp8.recipe.name, name)
    if len(first) > 1:
        parts = ", ".join(f"'{name}' runs {recipe}" for recipe, name in first.items())
        raise ValueError(
            f"format {format!r} has one recipe for all layers, but {parts}; convert the model with "
            "the recipe of its frozen layers, recipe='blockwise'"
        )
    return next(iter(first))


def refuse_tied(name: str, owner: str, layers: dict[str, Float8Layer]) -> None:
    """Refuse an FP8 layer that shares its weight with another module.

    A frozen output layer's weight, which the embedding reads, is written in BF16.
    """
    pair = [layers[each] for each in (name, owner) if each in layers]
    if any(not (isinstance(m, OutputLayer) and m.loss_head.was_frozen) for m in pair):
        raise ValueError(
            f"'{name}' runs in FP8 and shares its weight with '{owner}', which engines tie to it "
            f"in high precision; convert the model with {name!r} in skip"
        )


def refuse_ambiguous(fp8: Iterable[str], ignored: Iterable[str]) -> None:
    """Refuse names that would make transformers leave an FP8 layer in high precision.

    It also matches each name in ``modules_to_not_convert`` as a suffix.
    """
    for plain in ignored:
        for name in fp8:
            if name.endswith(plain) or name.startswith(f"{plain}."):
                raise ValueError(
                    f"'{plain}' is not in FP8, but '{name}' is, and engines would confuse the two. "
                    f"Convert the model with {name!r} in skip"
                )


def check_finite(key: str, values: Tensor | QuantizedTensor) -> None:
    """Refuse values with an Inf or NaN, with the name of their tensor; there are none on meta."""
    codes, scale = (None, values) if isinstance(values, Tensor) else values[:2]
    if (scale if codes is None else codes).is_meta:
        return
    is_finite = not scale.is_floating_point() or bool(scale.isfinite().all())
    if codes is not None:
        is_finite &= not bool((codes.view(torch.uint8) & _NAN_BITS == _NAN_BITS).any())
    if not is_finite:
        raise ValueError(
            f"'{key}' holds an Inf or NaN, so training has diverged; export an earlier checkpoint"
        )
