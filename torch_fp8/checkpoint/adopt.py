"""Models that a host loaded from an FP8 checkpoint: how they are trained and saved.

Without a GPU, or with ``dequantize=True``, transformers rounds every weight to BF16, 2^-9 relative,
and the model is one in BF16 like any other: `torch_fp8.load_trainable` and `torch_fp8.load_frozen`
read the exact values of the files. These layers have the bytes of the file:

* transformers' ``FP8Linear``, if there is a GPU: E4M3 codes and ``weight_scale_inv``; its backward
  multiplies by a BF16 copy of the weight.
* ``nn.Linear`` as the library compressed-tensors changes it: codes, ``weight_scale`` and a
  ``quantization_scheme``; a hook of the model converts all weights to BF16 in the first forward.
  Its scales are those that the host has rounded to the model's dtype.
* transformers' ``FP8Experts``: E4M3 codes (E, R, C), and ``weight_scale_inv`` of 128 x 128 blocks.

A frozen weight keeps the bytes, and a trained weight becomes BF16 and a residual that waits for its
optimizer. The layer becomes an ``nn.Linear``, which is then converted like any other. Experts are
replaced by the module that the model has without quantization. Their frozen weights are cast again
with a scale for each row, since grouped GEMMs do not support blocks.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.checkpoint.formats import METHODS, block_of_strategy
from torch_fp8.config import FP8Config
from torch_fp8.conversion.frozen_layers import frozen_recipe, option_that_keeps
from torch_fp8.optim.residual import split_parts
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.frozen_payload import FP8Weight, freeze_tensor, scale_grid
from torch_fp8.tensor.frozen_weight import frozen_parameter

_SCALES = tuple(dict.fromkeys(f"weight{row.scale_suffix}" for row in METHODS.values()))
_OWN = (
    *_SCALES,
    *("activation_scale", "block_size", "activation_scheme", "has_bias"),
    *("weight_zero_point", "input_scale", "output_scale"),
    *("quantization_scheme", "quantization_status"),
)


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
        config: the configuration; level O1, ``frozen_weights="keep"`` and another backend leave the
            layers as they are.
        device: the device on which the model will run, or None for its current device.
        trained: whether an optimizer will use residuals; a model for evaluation needs none.
        sharded: whether ``fully_shard`` comes next. It replaces the Parameters to which residuals
            are attached, so none are created; a model that is already sharded gets none either.
    Returns:
        Lines on what was done; none for other models, and on a second call.
    Raises:
        ValueError: the scales of a layer are broken (the error names it); no layer was changed
            then.
    """
    saved = save_dequantized(model)
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    spec = frozen_recipe(config, device)[0].weight
    sharded = sharded or any(isinstance(p, DTensor) for p in model.parameters())
    lines = _take_over_layers(model, config, spec, trained, not sharded)
    return [*lines, SAVED_DEQUANTIZED] if saved else lines


@torch.no_grad()
def _take_over_layers(
    model: nn.Module, config: FP8Config, spec: CastSpec, trained: bool, residuals: bool
) -> list[str]:
    """Turn other libraries' FP8 layers in `model` into linear layers with the same bytes.

    transformers then treats the model as not quantized; otherwise it would save it as if it still
    had such layers. All scales are checked before the first layer changes.
    """
    layers = [(name, module) for name, module in model.named_modules() if _scale_name(module)]
    if not layers:
        return []
    own = _is_of_host(layers[0][1], "FP8Linear")
    num_layers = len(layers)
    kind = "transformers' FP8Linear layers" if own else "compressed-tensors layers"
    option = option_that_keeps(config)
    if option is not None:
        return [f"{num_layers} {kind} are left unchanged ({option})"]
    weights = [_weight_of(name, layer) for name, layer in layers]
    lines = _take_over_experts(model, config, trained, residuals)
    num_trained = num_anew = 0
    while layers:  # free each one before the next
        (name, layer), weight = layers.pop(), weights.pop()
        if trained and layer.weight.requires_grad:
            layer._parameters[_scale_name(layer)].requires_grad_(False)  # an optimizer may have it
            _continue_exactly(layer.weight, weight, config, residuals)
            num_trained += 1
        else:
            num_anew += weight.scale_for(spec) is None
            payload = freeze_tensor(weight, spec, f"{name}.weight")
            layer._parameters["weight"] = frozen_parameter(payload)
        for attribute in _OWN:
            layer._parameters.pop(attribute, None)
            layer.__dict__.pop(attribute, None)
        if "_hf_hook" not in layer.__dict__:  # Accelerate's hook calls the forward of the class
            layer.__dict__.pop("forward", None)
        layer.__class__ = nn.Linear
        del layer, weight
    _no_longer_quantized(model)
    said = _counts(
        ("are trained from their exact values", num_trained),
        ("keep the same bytes", num_layers - num_trained - num_anew),
        (f"are quantized again, {spec.granularity}", num_anew),
    )
    return [f"{num_layers} {kind} were replaced by linear layers: {said}", *lines]


def _scale_name(module: nn.Module) -> str:
    """Return the attribute with the scales of another library's FP8 layer, or "" if it is none."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype != torch.float8_e4m3fn or weight.is_meta:
        return ""
    known = "quantization_scheme" in vars(module) and type(module) is nn.Linear
    names = [name for name in _SCALES if isinstance(module._parameters.get(name), Tensor)]
    return names[0] if names and (known or _is_of_host(module, "FP8Linear")) else ""


def _is_of_host(module: nn.Module, name: str) -> bool:
    cls = type(module)
    return cls.__name__ == name and cls.__module__.startswith("transformers.")


def _block_of(name: str, layer: Any) -> tuple[int, int]:
    """Return the rows and columns of a layer's weight that share a scale."""
    scheme, block = vars(layer).get("quantization_scheme"), (0, 0)
    if scheme is not None:
        strategy = getattr(scheme.weights.strategy, "value", scheme.weights.strategy)
        block = block_of_strategy({**vars(scheme.weights), "strategy": strategy}, name)
    elif layer.block_size:
        block = layer.block_size
    rows, cols = layer.weight.shape
    return block[0] or rows, block[1] or cols


def _weight_of(name: str, layer: Any) -> FP8Weight:
    scale_name = _scale_name(layer)
    qdata, scale = layer.weight.detach(), layer._parameters[scale_name].detach().float()
    block = _block_of(name, layer)
    grid = scale_grid(qdata.shape, block)
    shape = tuple(scale.shape)
    if scale.numel() != math.prod(grid) or (scale.ndim == 2 and shape != grid):
        raise ValueError(
            f"'{name}.{scale_name}' has shape {shape}, not {grid}: the checkpoint is broken"
        )
    _check_positive(f"{name}.{scale_name}", scale)
    return FP8Weight(qdata, scale.reshape(grid), block)


def _no_longer_quantized(model: nn.Module) -> None:
    for module in model.modules():
        hook = vars(module).pop("ct_decompress_hook", None)
        if hook is not None:
            hook.remove()
        quantizer = vars(module).get("hf_quantizer")
        if quantizer is not None:
            quantizer.remove_quantization_config(module)


_EXPERT_SCALES = METHODS["fine-grained"].scale_suffix


@torch.no_grad()
def _take_over_experts(
    model: nn.Module, config: FP8Config, trained: bool, residuals: bool
) -> list[str]:
    """Turn transformers' FP8 experts in `model` into those of the model without quantization."""
    experts = [
        (name, module, {key: _fused_weight(f"{name}.{key}", *of) for key, *of in _weights(module)})
        for name, module in model.named_modules()
        if _is_of_host(module, "FP8Experts")
        and all(w.dtype == torch.float8_e4m3fn and not w.is_meta for _, w, _ in _weights(module))
    ]
    stocks: dict[str, nn.Module] = {}
    exact = anew = 0
    while experts:  # free each one before the next
        name, module, fused = experts.pop()
        stock = _stock_module(model, name, stocks)
        for key, weight, scale in _weights(module):
            stored = fused.pop(key)
            scale.requires_grad_(False)  # an optimizer may have it
            if trained and weight.requires_grad:
                _continue_exactly(weight, stored, config, residuals)
                stock._parameters[key] = weight
                exact += 1
            else:
                values = stored.dequantize(torch.bfloat16).view(weight.shape)  # (E, R, C)
                stock._parameters[key] = nn.Parameter(values, requires_grad=False)
                anew += 1
        stock.train(module.training)
        model.set_submodule(name, stock)
        del module, weight, scale, stored
    said = _counts(
        ("are trained from their exact values", exact),
        ("are cast again when frozen, with one scale per row", anew),
    )
    text = f"transformers' FP8Experts were replaced by the model's own experts: {said}"
    return [text] if said else []


def _counts(*parts: tuple[str, int]) -> str:
    return "; ".join(f"{count} {what}" for what, count in parts if count)


def _continue_exactly(weight: Any, stored: FP8Weight, config: FP8Config, residuals: bool) -> None:
    """Turn a trained weight into BF16 and a residual; the Parameter may already have an optimizer.

    `residuals` says whether the bits below BF16 are kept for the optimizer.
    """
    weight.data = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    split_parts(weight, stored.parts(), residual=residuals and config.keeps_residuals)


def _check_positive(name: str, scale: Tensor) -> None:
    """Raise a ValueError, with the name, if scales are not finite or not positive."""
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(
            f"'{name}' holds a scale that is not finite or not positive: the checkpoint is broken"
        )


def _weights(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, weight, scales) of a module's fused weights."""
    for key, scale in list(module._parameters.items()):
        if key.endswith(_EXPERT_SCALES) and scale is not None:
            name = key.removesuffix(_EXPERT_SCALES)
            yield name, module._parameters[name], scale


def _fused_weight(name: str, weight: Tensor, scale: Tensor) -> FP8Weight:
    """Return a weight (E, R, C) as one matrix (E * R, C).

    Args:
        name: the weight's qualified name.
        weight: (E, R, C).
        scale: (E, R / rows, C / columns).
    """
    shape, grid = tuple(weight.shape), tuple(scale.shape)
    is_stacked = len(grid) == 3 and grid[0] == shape[0]
    if not is_stacked or any(n % g for n, g in zip(shape[1:], grid[1:], strict=True)):
        raise ValueError(
            f"'{name}{_EXPERT_SCALES}' has shape {grid}, which does not divide {shape} into "
            "blocks: the checkpoint is broken"
        )
    _check_positive(f"{name}{_EXPERT_SCALES}", scale)
    codes, scales = weight.detach().flatten(0, 1), scale.detach().float().flatten(0, 1)
    return FP8Weight(codes, scales, (shape[1] // grid[1], shape[2] // grid[2]))


def _stock_module(model: nn.Module, name: str, stocks: dict[str, nn.Module]) -> nn.Module:
    """Return the experts that a model has at a place without quantization, on the meta device.

    Args:
        model: the transformers model, possibly inside others.
        name: the name of the experts in it.
        stocks: stock models by the name of the transformers model that they match; new ones are
            added.
    """
    root: Any
    place, root = next(  # an attribute of the class: a PEFT model forwards those of its model
        (place, module)
        for place, module in model.named_modules()
        if name.startswith(f"{place}." if place else "")
        and isinstance(getattr(type(module), "base_model_prefix", None), str)
    )
    if place not in stocks:
        config = copy.deepcopy(root.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            stocks[place] = type(root)(config)
    parts = name.removeprefix(f"{place}.").split(".")
    inner = ".".join(part for part in parts if part != "base_layer")
    module: Any = stocks[place].get_submodule(inner)
    module.config = model.get_submodule(name).config
    return module


SAVED_DEQUANTIZED = (
    "the model was loaded from an FP8 checkpoint and will be saved in its current dtype; stock "
    "transformers would quantize all of its matrices and write no quantization_config"
)


def save_dequantized(model: nn.Module) -> int:
    """Make transformers save a dequantized model in its current dtype.

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
