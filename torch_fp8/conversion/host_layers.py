"""transformers' own FP8 layers, which it makes of an FP8 checkpoint where there is a GPU.

``FP8Linear`` holds E4M3 codes and ``weight_scale_inv``; its backward multiplies by a BF16 copy of
the weight. Its bytes are those of the file, so a frozen weight takes them over as they are, and a
trained one becomes BF16 and the residual that waits for its optimizer. The layer is an
``nn.Linear`` then, which is converted like any other.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.fp8_weight import FP8Weight, frozen_payload
from torch_fp8.optim.pending_residual import split_parts
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.frozen_payload import freeze_tensor
from torch_fp8.tensor.frozen_weight import frozen_parameter

_OWN = ("weight_scale_inv", "activation_scale", "block_size", "activation_scheme", "has_bias")
_LEFT = {
    "opt_level='O1'": lambda config: config.opt_level == "O1",
    "frozen_weights='keep'": lambda config: config.frozen_weights == "keep",
    "backend='transformer-engine'": lambda config: config.backend == "transformer-engine",
}


@torch.no_grad()
def take_over_layers(
    model: nn.Module, config: FP8Config, spec: CastSpec, *, trained: bool, residuals: bool = True
) -> list[str]:
    """Turn the FP8 layers of transformers in `model` into linear layers with the same bytes.

    The model then counts as not quantized for transformers, which would save it as if it still had
    such layers.

    Args:
        model: any; converted afterwards.
        config: level O1, ``frozen_weights="keep"`` and another backend leave the layers as they
            are.
        spec: how frozen weights are cast.
        trained: whether weights that require gradients are trained.
        residuals: whether the bits below BF16 of these wait for an optimizer.
    Returns:
        Lines that say what was done; none where there are no such layers.
    Raises:
        ValueError: the scales of a layer are broken, with its name; no layer was changed then.
    """
    layers = [(name, module) for name, module in model.named_modules() if _is_fp8_linear(module)]
    if not layers:
        return []
    for option, given in _LEFT.items():
        if given(config):
            return [f"{len(layers)} FP8Linear layers of transformers stay as they are ({option})"]
    weights = [_weight_of(name, layer) for name, layer in layers]
    num_layers, num_trained = len(layers), 0
    while layers:  # each is let go before the next one
        (name, layer), weight = layers.pop(), weights.pop()
        if trained and layer.weight.requires_grad:
            layer.weight_scale_inv.requires_grad_(False)  # an optimizer may have it
            layer.weight.data = torch.empty(
                weight.shape, dtype=torch.bfloat16, device=weight.qdata.device
            )
            split_parts(layer.weight, weight.parts(), config.residual_bits if residuals else 0)
            num_trained += 1
        else:
            payload = frozen_payload(weight, spec, f"{name}.weight", torch.bfloat16)
            if payload is None:
                payload = freeze_tensor(weight.dequantize(), spec, f"{name}.weight", torch.bfloat16)
            layer._parameters["weight"] = frozen_parameter(payload)
        for attribute in _OWN:
            layer._parameters.pop(attribute, None)
            layer.__dict__.pop(attribute, None)
        layer.__class__ = nn.Linear
        del layer, weight
    _no_longer_quantized(model)
    kept = num_layers - num_trained
    return [
        f"{num_layers} FP8Linear layers of transformers became linear layers: {num_trained} are "
        f"trained, from their exact values; {kept} hold the same bytes"
    ]


def _is_fp8_linear(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return (
        type(module).__name__ == "FP8Linear"
        and type(module).__module__.startswith("transformers.")
        and isinstance(module._parameters.get("weight_scale_inv"), Tensor)
        and weight is not None
        and weight.dtype == torch.float8_e4m3fn
        and not weight.is_meta
    )


def _weight_of(name: str, layer: Any) -> FP8Weight:
    qdata, scale = layer.weight.detach(), layer.weight_scale_inv.detach().float()
    block = tuple(layer.block_size or qdata.shape)
    grid = tuple(math.ceil(n / b) for n, b in zip(qdata.shape, block, strict=True))
    what = f"'{name}.weight_scale_inv'"
    if scale.numel() != math.prod(grid) or (scale.ndim == 2 and tuple(scale.shape) != grid):
        raise ValueError(
            f"{what} has shape {tuple(scale.shape)}, not {grid}: the checkpoint is bad"
        )
    if not bool(scale.isfinite().all()) or not bool((scale > 0).all()):
        raise ValueError(
            f"{what} holds a scale that is not finite or not positive: the checkpoint is bad"
        )
    return FP8Weight(qdata, scale.reshape(grid), (block[0], block[1]))


def _no_longer_quantized(model: nn.Module) -> None:
    for module in model.modules():
        quantizer = vars(module).get("hf_quantizer")
        if quantizer is not None:
            quantizer.remove_quantization_config(module)
