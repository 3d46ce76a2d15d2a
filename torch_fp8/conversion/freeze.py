"""`freeze` stores weights as FP8 only, and `thaw` gives them their dtype back.

A weight stored as FP8 only takes one byte per element and cannot be trained. Conversion therefore
does this by itself only if it is certain that nothing will train the weight: PEFT froze the base of
its adapters, or a host prepared the model for evaluation and no optimizer has it. A weight that
your script froze may be unfrozen later, so you ask for this storage yourself, by
``FP8Config(frozen_weights="fp8")`` or `freeze`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.conversion.convert import convert
from torch_fp8.conversion.frozen_layers import (
    FreezeReport,
    freeze_as_configured,
    freeze_weights,
    meant_to_freeze,
    option_that_keeps,
)
from torch_fp8.conversion.fused_layers import convert_producers
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.optimizer_checks import guard
from torch_fp8.quantization.argument_types import check_arguments


@torch.inference_mode(False)
def freeze(
    model: nn.Module,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> FreezeReport:
    """Store the weights of the FP8 layers of `model` as FP8 only, in place. They cannot be trained.

    A model that is not converted yet is converted first. In a model with PEFT adapters, the weights
    that PEFT trains stay as they are; in any other model all FP8 layers are frozen, whatever their
    ``requires_grad``. Embeddings, norms, modules matched by `config.skip`, and weights
    shared by several modules keep their dtype. The Parameters stay the same objects, and their
    memory in the old dtype is freed. ``state_dict`` returns plain BF16 tensors under the same keys.
    An optimizer with a frozen weight raises ValueError at its conversion or first step.

    Args:
        model: any module that `torch_fp8.convert_to_float8` accepts.
        config: see `torch_fp8.convert_to_float8`, or None for the model's configuration, if it has
            one.
        device: see `torch_fp8.convert_to_float8`.
    Returns:
        A report of the frozen layers, and of the others with the reasons.
    Raises:
        ValueError, TypeError: see `torch_fp8.convert_to_float8`; also for O1,
            ``frozen_weights="keep"`` or another backend, which leave weights as they are.
    """
    check_arguments(freeze, locals())
    layers = _layers(model)
    is_converted = config is None and bool(layers)
    config = _config_of(layers) if is_converted else config_or_default(config)
    refuse_kept(config)
    if not is_converted:
        report = convert(model, config, device, partial(freeze_as_configured, every=True)).frozen
    else:
        target = torch.device(device) if device is not None else layers[0].fp8_weights[0].device
        report = freeze_weights(model, config, target, meant_to_freeze(model, config, every=True))
        if report.frozen:
            convert_producers(model, config)
    guard(model)
    return report


@torch.inference_mode(False)
def thaw(model: nn.Module) -> int:
    """Give the weights of `model` that are stored as FP8 only their dtype back, in place.

    Their values are the FP8 values, and they still do not require gradients. The Parameters stay
    the same objects, and the layers return to the recipe that they had before.

    Args:
        model: any module.
    Returns:
        The number of weights that were thawed.
    Raises:
        RuntimeError: FSDP2 has sharded a frozen weight.
    """
    check_arguments(thaw, locals())
    count = sum(m.thaw_weights() for m in model.modules() if isinstance(m, FrozenStorage))
    layers = _layers(model)
    if count:
        convert_producers(model, _config_of(layers))
    return count


def _layers(model: nn.Module) -> list[Any]:
    """Return the linear layers and expert modules that run in FP8."""
    return [module for module in model.modules() if isinstance(module, FrozenStorage)]


def _config_of(layers: Sequence[RunsFP8]) -> FP8Config:
    """Return the configuration of a model, some of whose layers may have overrides."""
    configs = [layer.fp8.config for layer in layers]
    return next((config for config in configs if config.overrides), configs[0])


def refuse_kept(config: FP8Config, function: str = "freeze") -> None:
    """Raise ValueError for a configuration that leaves frozen weights as they are.

    These are O1, ``frozen_weights="keep"`` and another backend.
    """
    option = option_that_keeps(config)
    if option is not None:
        raise ValueError(
            f"FP8Config({option}) leaves frozen weights unchanged, but {function}() was called; "
            "leave that option out"
        )
