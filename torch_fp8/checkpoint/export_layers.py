"""Which FP8 layers of a model a format, and the engines that read it, can hold in FP8."""

from typing import Any

from torch import nn

from torch_fp8.checkpoint.export_format import ExportFormat
from torch_fp8.checkpoint.plain_dtype import is_left_by_quantizers
from torch_fp8.nn.layer_filter import is_linear, output_layer
from torch_fp8.nn.linear import Float8Layer

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
    places: list[tuple[str, nn.Module]],
    format: ExportFormat,
) -> dict[str, str]:
    """Return for each FP8 layer why it cannot be written in FP8; an empty string if it can.

    Args:
        model: the transformers model, whose configuration has the numbers of heads.
        layers: the FP8 layers by name.
        places: all modules by name.
        format: the format of the export.
    """
    linears = {name for name, module in places if is_linear(module)}
    heads = {id(output_layer(module)) for _, module in places} - {id(None)}
    held = {}
    for name, layer in layers.items():
        reason = format.refusal(layer.out_features, layer.in_features) or ""
        if layer.fp8.transposed:
            reason = "engines read Conv1D weights in 16 bits"
        elif id(layer) in heads:
            reason = "engines keep the output layer in 16 bits"
        elif format.name == "fine-grained" and is_left_by_quantizers(model, name):
            reason = "transformers keeps it in high precision"
        elif not reason and format.granularity == "block_128x128":
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
