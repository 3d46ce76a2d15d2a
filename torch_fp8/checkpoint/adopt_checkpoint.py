"""Models that a host loaded from an FP8 checkpoint: how they are trained and saved.

A host that keeps FP8 layers hands their bytes over (`torch_fp8.checkpoint.host_layers`). Without a
GPU, or with ``dequantize=True``, transformers rounds every weight to BF16, 2^-9 relative, and the
model is one in BF16 like any other: `torch_fp8.load_trainable` and `torch_fp8.load_frozen` read the
exact values of the files.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_fp8.checkpoint.host_layers import take_over_layers
from torch_fp8.config import FP8Config
from torch_fp8.conversion.frozen_layers import frozen_recipe


def take_over(
    model: nn.Module,
    config: FP8Config,
    device: torch.device | None = None,
    *,
    trained: bool = True,
    sharded: bool = False,
) -> list[str]:
    """Prepare a model that its host loaded from an FP8 checkpoint for training and saving.

    Args:
        model: any model, which is converted afterwards.
        config: the configuration; see `torch_fp8.checkpoint.host_layers.take_over_layers`.
        device: the device on which the model will run, or None for its present device.
        trained: whether an optimizer will use residuals; a model for evaluation needs none.
        sharded: whether ``fully_shard`` comes next. It replaces the Parameters to which residuals
            are attached, so none are created; a model that is already sharded gets none either.
    Returns:
        Lines on what was done; none for other models, and on a second call.
    """
    saved = save_dequantized(model)
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    spec = frozen_recipe(config, device)[0].weight
    sharded = sharded or any(isinstance(p, DTensor) for p in model.parameters())
    lines = take_over_layers(model, config, spec, trained=trained, residuals=not sharded)
    return [*lines, SAVED_DEQUANTIZED] if saved else lines


def folder_of(config: Any) -> Path | None:
    """Return the local folder that a host's model was loaded from, or None if there is none."""
    name = getattr(config, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    hub = sys.modules.get("huggingface_hub")  # imported if the model came from the hub
    if hub is None or Path(name).is_absolute():
        return None
    revision = getattr(config, "_commit_hash", None)
    try:
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a name on the hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None


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
            others = [op for op in operations if type(op).__name__ != "Fp8Dequantize"]
            if len(others) == len(operations):
                entries.append(conversion)
                continue
            dropped += 1
            if others:  # for example a merge of experts
                sources = conversion._original_source_patterns
                sources = [s for s in sources if not s.endswith(("_scale_inv", "activation_scale"))]
                targets = conversion._original_target_patterns
                entries.append(conversion.copy(sources, targets, operations=others))
        module.__dict__["_weight_conversions"] = entries
    return dropped
