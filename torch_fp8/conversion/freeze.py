"""`freeze` stores weights as FP8 only, and `thaw` gives them their dtype back.

A weight stored as FP8 only takes one byte per element and cannot be trained. Conversion therefore
does this by itself only if it is certain that nothing will train the weight: PEFT froze the base of
its adapters, or a host prepared the model for evaluation and no optimizer has it. A weight that
your script froze may be unfrozen later, so you ask for this storage yourself, by
``FP8Config(frozen_weights="fp8")`` or `freeze`.

FP8 weights of checkpoints: E4M3 codes and float32 scales of rectangular blocks.

``x ~= qdata.float() * scale``, whatever a format calls the scale (``weight_scale_inv`` is a
multiplier, too). The shape of the scales gives the size of the blocks: () or (1, 1) for one scale,
(N, 1) for one per row, (ceil(N / 128), ceil(K / 128)) for blocks of 128 x 128, (N, ceil(K / 32))
for groups of 32. N are output features, K input features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.conversion.frozen_layers import (
    FreezeReport,
    freeze_weights,
    option_that_keeps,
    proven_frozen,
)
from torch_fp8.conversion.fused_layers import convert_producers
from torch_fp8.conversion.layer_options import base_config
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.optimizer_checks import guard
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.block_scaled import row_parts
from torch_fp8.quantization.payload_shape import scale_shape
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.frozen_payload import FrozenPayload, frozen_from_bytes


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
    ``requires_grad``. Embeddings, norms, ``lm_head``, modules matched by `config.skip`, and weights
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
        convert_producers(model, base_config(layers))
    return count


def _layers(model: nn.Module) -> list[Any]:
    """Return the linear layers and expert modules that run in FP8."""
    ours = (Float8Layer, Float8Experts)
    return [module for module in model.modules() if isinstance(module, ours)]


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


FROZEN_BLOCK = (128, 128)
"""Rows and columns that share a scale in frozen weights, and in the recipe ``blockwise``."""


@dataclass(frozen=True)
class FP8Weight:
    """The exact value of a weight in an FP8 checkpoint.

    Attributes:
        qdata: (N, K) float8_e4m3fn.
        scale: (ceil(N / R), ceil(K / C)) float32, positive and finite.
        block: (R, C), numbers of rows and columns that share a scale.
    """

    qdata: Tensor
    scale: Tensor
    block: tuple[int, int]

    def to(self, device: torch.device) -> "FP8Weight":
        """Return the weight on another device."""
        return FP8Weight(self.qdata.to(device), self.scale.to(device), self.block)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of rows with their float32 values (r, K).

        A value is the code times the scale, rounded once (relative error 2^-24).
        """
        for rows in row_parts(*self.qdata.shape):
            yield rows, self.qdata[rows].float().mul_(_spread(self, rows))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K) in `dtype`, rounded once more for BF16 or float16."""
        whole = torch.empty(self.qdata.shape, dtype=dtype, device=self.qdata.device)
        for rows, value in self.parts():
            whole[rows] = value
        return whole


def scale_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape (ceil(N / R), ceil(K / C)) of the scales of a weight (N, K)."""
    return tuple(-(-n // side) for n, side in zip(shape, block, strict=True))


def frozen_payload(
    weight: FP8Weight, spec: CastSpec, name: str, dtype: torch.dtype
) -> FrozenPayload | None:
    """Return the bytes of a checkpoint's weight as the payload of a frozen weight.

    Args:
        weight: weight from a checkpoint.
        spec: cast of the frozen weight, ``block_128x128`` or ``tensorwise``. If `weight` has a
            single scale, each block gets it.
        name: qualified name, for errors.
        dtype: dtype of the weight when it is thawed.
    Returns:
        A payload that shares memory with `weight`, or None if its blocks do not fit `spec`.
    """
    (rows, cols), scale = weight.qdata.shape, weight.scale
    if spec.granularity == "tensorwise":
        if scale.numel() != 1:
            return None
        scale = scale.reshape(())
    elif scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(scale_shape(rows, cols, spec.granularity))
    elif weight.block != FROZEN_BLOCK:
        return None
    return frozen_from_bytes(weight.qdata, scale.contiguous(), spec, name, dtype)


def _spread(weight: FP8Weight, rows: slice) -> Tensor:
    """Return a scale for each element of some rows: (rows, K), or a shape that broadcasts to it."""
    scale, (height, width) = weight.scale, weight.block
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    index = torch.arange(rows.start, rows.stop, device=scale.device) // height
    scale = scale[index]  # (rows, ceil(K / C))
    cols = weight.qdata.shape[1]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, 1)[:, :cols]
