"""A model that transformers has dequantized is saved in the dtype that it has now."""

from typing import Any

from torch import nn

_DEQUANTIZERS = ("Fp8Dequantize",)
"""transformers' operations that, reversed, quantize whatever is saved."""

SAVED_DEQUANTIZED = (
    "the model was loaded from an FP8 checkpoint and will be saved in its current dtype; stock "
    "transformers would quantize all of its matrices and write no quantization_config"
)


def save_dequantized(model: nn.Module) -> int:
    """Let transformers save what it has dequantized in the dtype that it has now.

    A model that transformers (5.0 to 5.23 at least) has dequantized keeps the conversion that did
    it, and reverses it when it is saved: all matrices, embeddings and output layer too, are
    quantized, and no ``quantization_config`` says so. Loaded again, the codes are taken for
    weights. Here the operation is dropped from the model's conversions.

    Args:
        model: any; parts of it that transformers loaded are looked at.
    Returns:
        The number of conversions that were changed: 0 the second time.
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
    """Return a conversion of transformers that merges experts, say, without what read scales."""
    scales = ("_scale_inv", "activation_scale")
    sources = [s for s in conversion._original_source_patterns if not s.endswith(scales)]
    return conversion.copy(sources, conversion._original_target_patterns, operations=operations)
