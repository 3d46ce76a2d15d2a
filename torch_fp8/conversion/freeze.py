"""The public functions that hold weights in FP8 alone, `freeze`, and give them back, `thaw`.

A weight in FP8 alone takes one byte an element, and cannot be trained. So conversion does it by
itself only where nobody will train it for sure: PEFT has frozen the base of its adapters, or a host
has prepared a model for evaluation and no optimizer has it. What a script has frozen by hand it may
unfreeze later: this is stored so with ``FP8Config(frozen_weights="fp8")``, or by `freeze`.
"""

from typing import Any

import torch
from torch import nn

from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.conversion.frozen_layers import (
    FreezeReport,
    freeze_weights,
    option_that_keeps,
    proven_frozen,
    thaw_weights,
)
from torch_fp8.conversion.fused_layers import convert_producers
from torch_fp8.conversion.layer_options import base_config
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.training_guard import guard


def freeze(
    model: nn.Module,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> FreezeReport:
    """Hold the weights of the FP8 layers of `model` in FP8 alone, in place: nobody trains them.

    A model that is not converted is converted first. Of a model with PEFT's adapters the weights
    that PEFT trains stay as they are; of any other all FP8 layers are frozen, whatever their
    ``requires_grad``. Embeddings, norms, ``lm_head``, what `config.skip` names and weights that
    several modules share stay in their dtype. The Parameters stay the same objects; their memory
    in the old dtype is released. ``state_dict`` has plain BF16 tensors under the same keys. An
    optimizer that has one of them raises a ValueError when it is converted, or at its first step.

    Args:
        model: any module that `torch_fp8.convert_to_float8` takes.
        config, device: see there. `config` None: that with which the model was converted.
    Returns:
        What is frozen, and why the rest is not.
    Raises:
        ValueError, TypeError: see `torch_fp8.convert_to_float8`; the configuration says level O1 or
            ``frozen_weights="keep"``, which leave weights as they are, or names another backend.
    """
    layers = _layers(model)
    if config is not None or not layers:
        config = config_or_default(config)
        refuse_kept(config)
        convert_to_float8(model, config, device=device)
        layers = _layers(model)
    config = base_config(layers)
    refuse_kept(config)
    target = torch.device(device) if device is not None else layers[0].fp8_weights[0].device
    proven = proven_frozen(model)
    adapted = any(proven(layer) for layer in layers)
    guard(model)
    meant = proven if adapted else lambda module: True
    return freeze_weights(model, config, target, meant)


def thaw(model: nn.Module) -> int:
    """Give the weights of `model` that are held in FP8 alone their own dtype back, in place.

    They have the values that FP8 held, and still do not require gradients. The Parameters stay the
    same objects; the layers run the recipe again that they had.

    Args:
        model: any module.
    Returns:
        The number of weights.
    Raises:
        RuntimeError: weights that FSDP2 has sharded.
    """
    count = thaw_weights(model)
    layers = _layers(model)
    if count:
        convert_producers(model, base_config(layers))
    return count


def _layers(model: nn.Module) -> list[Any]:
    """Return the linear layers and the modules of experts that run in FP8."""
    ours = (Float8Layer, Float8Experts)
    return [module for module in model.modules() if isinstance(module, ours)]


def refuse_kept(config: FP8Config, function: str = "freeze") -> None:
    """Refuse a configuration that leaves frozen weights as they are.

    Raises:
        ValueError: level O1, ``frozen_weights="keep"`` or another backend.
    """
    option = option_that_keeps(config)
    if option is not None:
        raise ValueError(
            f"FP8Config({option}) leaves frozen weights as they are, but {function}() was called; "
            "leave that option out"
        )
