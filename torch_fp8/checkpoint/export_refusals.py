"""Refusals of an export: each error is a ValueError that names the layer and a way out."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.checkpoint.stored_names import StoredPart
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.transformer_engine import TransformerEngineLinear
from torch_fp8.ops.quantize import QuantizedTensor

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


def refuse_unsplit(name: str, parts: Mapping[str, Sequence[StoredPart]]) -> None:
    """Refuse experts whose weights checkpoints do not store one by one."""
    for key, of_key in parts.items():
        if any(part.expert is None for part in of_key):
            raise ValueError(
                f"'{key}' holds the experts of '{name}' in one tensor, also in checkpoints, and "
                "engines read such experts in 16 bits or in their own formats; save the model with "
                "save_pretrained"
            )


def refuse_tied(name: str, owner: str, layers: dict[str, Float8Layer]) -> None:
    """Refuse an FP8 layer that shares its weight with another module."""
    if name in layers or owner in layers:
        raise ValueError(
            f"'{name}' runs in FP8 and shares its weight with '{owner}', which engines tie to it "
            f"in high precision; convert the model with {name!r} in skip"
        )


def refuse_sharded(key: str, tensor: Tensor) -> None:
    """Refuse a tensor of which this rank has only a part."""
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"'{key}' is sharded across ranks; save the model with Lightning or Accelerate, then "
            "run torch-fp8 export on that checkpoint"
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
    """Refuse values with an Inf or NaN, with the name of their tensor."""
    if isinstance(values, Tensor):
        is_finite = not values.is_floating_point() or bool(values.isfinite().all())
    else:
        is_nan = values.qdata.view(torch.uint8) & _NAN_BITS == _NAN_BITS
        is_finite = not bool(is_nan.any()) and bool(values.scale.isfinite().all())
    if not is_finite:
        raise ValueError(
            f"'{key}' holds an Inf or NaN: training has diverged, or the checkpoint is broken"
        )
