"""Save a model that transformers has dequantized in its present dtype."""

from typing import Any

from torch import nn

_DEQUANTIZERS = ("Fp8Dequantize",)
"""transformers' operations whose reverse quantizes tensors when a model is saved."""

SAVED_DEQUANTIZED = (
    "the model was loaded from an FP8 checkpoint and will be saved in its current dtype; stock "
    "transformers would quantize all of its matrices and write no quantization_config"
)


def save_dequantized(model: nn.Module) -> int:
    """Make transformers save a dequantized model in its present dtype.

    A model that transformers (5.0 to 5.23) has dequantized keeps the conversion, and
    transformers reverses it when it saves the model: all matrices, even embeddings and the output
    layer, are quantized without a ``quantization_config`` in the file. A later load would take the
    codes for weights. This function removes the operation from the model's conversions.

    Args:
        model: any model; the parts that transformers loaded are checked.
    Returns:
        The number of changed conversions; 0 on a second call.
    """
    dropped = 0
    for module in model.modules():
        conversions = vars(module).get("_weight_conversions")
        if not conversions or getattr(module, "is_quantized", False):
            continue
        entries = []
        for conversion in conversions:
            operations = getattr(conversion, "operations", None) or []
            others = [op for op in operations if type(op).__name__ not in _DEQUANTIZERS]
            if len(others) == len(operations):
                entries.append(conversion)
                continue
            dropped += 1
            if others:
                entries.append(_without_scales(conversion, others))
        module.__dict__["_weight_conversions"] = entries
    return dropped


def _without_scales(conversion: Any, operations: list[Any]) -> Any:
    """Return a transformers conversion, for example a merge of experts, without scales."""
    scales = ("_scale_inv", "activation_scale")
    sources = [s for s in conversion._original_source_patterns if not s.endswith(scales)]
    return conversion.copy(sources, conversion._original_target_patterns, operations=operations)
