"""Conversion of transformers' ``FP8Experts``, which it creates for an FP8 checkpoint on a GPU.

They hold E4M3 codes (E, R, C) and ``weight_scale_inv`` of blocks of 128 x 128. Each is replaced by
the module that the model has without quantization, which is then converted like any other. A
trained weight continues from its exact value, as BF16 and a residual that waits for the optimizer.
A frozen weight is cast again with a scale for each row, because grouped GEMMs do not support
blocks.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.fp8_weight import FP8Weight
from torch_fp8.optim.residual import split_parts

_SCALES = "_scale_inv"


def host_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the expert modules that transformers holds in FP8."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ == "FP8Experts"
        and type(module).__module__.startswith("transformers.")
        and all(w.dtype == torch.float8_e4m3fn for _, w, _ in _weights(module))
        and not any(w.is_meta for _, w, _ in _weights(module))
    ]


@torch.no_grad()
def take_over_experts(
    model: nn.Module, config: FP8Config, *, trained: bool, residuals: bool
) -> list[str]:
    """Turn transformers' FP8 experts in `model` into those of the model without quantization.

    Args:
        model, config, trained, residuals: see `torch_fp8.checkpoint.host_layers.take_over_layers`.
    Returns:
        A line on what was done; none if there are no such experts.
    Raises:
        ValueError: scales of a weight are broken (the error names it); nothing was changed then.
    """
    experts = host_experts(model)
    for name, module in experts:
        for key, weight, scale in _weights(module):
            _block_of(f"{name}.{key}", weight, scale)
    stocks: dict[str, nn.Module] = {}
    exact = anew = 0
    while experts:  # free each one before the next
        name, module = experts.pop()
        stock = _stock_module(model, name, stocks)
        for key, weight, scale in _weights(module):
            block = _block_of(name, weight, scale)
            scale.requires_grad_(False)  # an optimizer may have it
            codes = weight.detach().reshape(-1, weight.shape[2])  # (E, R, C) -> (E * R, C)
            stored = FP8Weight(codes, scale.detach().float().reshape(-1, scale.shape[2]), block)
            if trained and weight.requires_grad:
                continue_exactly(weight, stored, config, residuals)
                stock._parameters[key] = weight
                exact += 1
            else:
                values = stored.dequantize(torch.bfloat16).view(weight.shape)  # (E, R, C)
                stock._parameters[key] = nn.Parameter(values, requires_grad=False)
                anew += 1
        stock.train(module.training)
        model.set_submodule(name, stock)
        del module, weight, scale, codes, stored
    parts = {
        "are trained from their exact values": exact,
        "are cast again when frozen, with one scale per row": anew,
    }
    said = "; ".join(f"{count} {what}" for what, count in parts.items() if count)
    return (
        [f"transformers' FP8Experts were replaced by the model's own experts: {said}"]
        if said
        else []
    )


def continue_exactly(weight: Any, stored: FP8Weight, config: FP8Config, residuals: bool) -> None:
    """Turn a trained weight into BF16 and a residual; the Parameter may already have an optimizer.

    Args:
        weight: the Parameter with the codes of `stored`.
        stored: the exact value.
        config: the model's configuration.
        residuals: whether the bits below BF16 are kept for an optimizer.
    """
    weight.data = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    split_parts(weight, stored.parts(), residual=residuals and config.keeps_residuals)


def check_positive(name: str, scale: Tensor) -> None:
    """Raise a ValueError, with the name, if scales are not finite or not positive."""
    if not bool(scale.isfinite().all()) or not bool((scale > 0).all()):
        raise ValueError(
            f"'{name}' holds a scale that is not finite or not positive: the checkpoint is broken"
        )


def _weights(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, weight, scales) of a module's fused weights."""
    for key, scale in list(module._parameters.items()):
        if key.endswith(_SCALES) and scale is not None:
            name = key.removesuffix(_SCALES)
            yield name, module._parameters[name], scale


def _block_of(name: str, weight: Tensor, scale: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a weight (E, R, C) that share a scale.

    Args:
        name: the weight's qualified name.
        weight: (E, R, C).
        scale: (E, R / rows, C / columns).
    """
    shape, grid = tuple(weight.shape), tuple(scale.shape)
    is_stacked = len(grid) == 3 and grid[0] == shape[0]
    if not is_stacked or any(n % g for n, g in zip(shape[1:], grid[1:], strict=True)):
        raise ValueError(
            f"'{name}{_SCALES}' has shape {grid}, which does not divide {shape} into blocks: the "
            "checkpoint is broken"
        )
    check_positive(f"{name}{_SCALES}", scale)
    return shape[1] // grid[1], shape[2] // grid[2]


def _stock_module(model: nn.Module, name: str, stocks: dict[str, nn.Module]) -> nn.Module:
    """Return the experts that a model has at a place without quantization, on the meta device.

    Args:
        model: the transformers model, possibly inside others.
        name: the name of the experts in it.
        stocks: stock models by the name of the transformers model that they match; new ones are
            added.
    """
    parts = name.split(".")
    ends = (i for i in range(len(parts)) if _is_host_model(model, ".".join(parts[:i])))
    end = next(ends)
    place = ".".join(parts[:end])
    root: Any = model.get_submodule(place)
    if place not in stocks:
        config = copy.deepcopy(root.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            stocks[place] = type(root)(config)
    inner = ".".join(part for part in parts[end:] if part != "base_layer")
    module: Any = stocks[place].get_submodule(inner)
    module.config = model.get_submodule(name).config
    return module


def _is_host_model(model: nn.Module, name: str) -> bool:
    # An attribute of the class, because a PEFT model forwards attributes of the model inside.
    return isinstance(getattr(type(model.get_submodule(name)), "base_model_prefix", None), str)
