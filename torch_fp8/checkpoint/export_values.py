"""The values of exported tensors, computed one by one when they are written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.checkpoint.export_format import ExportFormat
from torch_fp8.checkpoint.export_refusals import check_finite
from torch_fp8.checkpoint.fold_adapters import AdapterFold
from torch_fp8.checkpoint.fold_smooth import SmoothFold
from torch_fp8.checkpoint.plain_dtype import PLAIN
from torch_fp8.checkpoint.safetensors_writer import PlannedTensor, TensorGroup
from torch_fp8.nn.delayed_scaling import INPUT, WEIGHT, pushed_history, scaling_buffers
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.quantize import QuantizedTensor, dequantize
from torch_fp8.quantization.scaling import delayed_scale, past_amax
from torch_fp8.tensor.base import dequantized
from torch_fp8.tensor.quantizer import Quantizer, WeightQuantizer
from torch_fp8.tensor.scale_source import ScaleSource


def weight_payload(layer: Float8Layer, weight: Tensor, *, current: bool = False) -> QuantizedTensor:
    """Return the weight (N, K) as the next forward of `layer` multiplies by it.

    Args:
        layer: the layer whose recipe, and with delayed scaling whose history, apply; neither
            changes.
        weight: the stored weight, (N, K) or (K, N): the layer's own, or another of the same shape.
        current: whether to compute the scale from `weight` even with delayed scaling, because
            factors are folded into it that its history does not include.
    """
    known = layer.fp8.scales_known and not current
    scale = scaling_buffers(layer)[1][WEIGHT, 0] if known else None
    quantizer = Quantizer(layer.fp8.recipe.weight, ScaleSource(scale))
    return WeightQuantizer(quantizer, transposed=layer.fp8.transposed).for_fprop(weight)


def input_scale(name: str, layer: Float8Layer) -> Tensor:
    """Return the () scale with which delayed scaling will cast the next input of `layer`.

    Raises:
        ValueError: no forward has recorded an amax yet, or an amax is not finite.
    """
    config, (history, _, amaxes, _) = layer.fp8.config, scaling_buffers(layer)
    if not bool(history.isfinite().all() & amaxes.isfinite().all()):
        raise ValueError(
            f"the amax history of the input of '{name}' holds an Inf or NaN, so its serving scale "
            "would be meaningless: training has diverged, or is about to; export an earlier "
            "checkpoint"
        )
    past = past_amax(pushed_history(layer)[INPUT], config.amax_compute_algo)
    if not bool(past):
        raise ValueError(
            f"'{name}' has recorded no amax of its input, so there is no input_scale; run a "
            "forward in training mode, or load the history (load_scaling_state_dict), then export"
        )
    return delayed_scale(past, layer.fp8.recipe.input.format, config.margin)


def as_it_is(planned: PlannedTensor, get: Callable[[], Tensor]) -> TensorGroup:
    """Return a tensor without FP8, in its planned dtype."""

    def make() -> tuple[Tensor]:
        value = dequantized(get()).to(planned.dtype)  # FP8 if it belongs to a paused layer
        check_finite(planned.name, value)
        return (value,)

    return TensorGroup((planned,), make)


def in_bf16(
    key: str, layer: Float8Layer, get: Callable[[], Tensor], reason: str, is_folded: bool
) -> TensorGroup:
    """Return the weight of an FP8 layer in BF16, which must hold its values exactly.

    Args:
        key: the weight's name in the checkpoint.
        layer: the layer.
        get: a function that returns the weight as it is stored.
        reason: the reason why it is not in FP8.
        is_folded: whether factors of Smooth-SwiGLU are folded into it.
    """
    shape = tuple(layer.weight.shape)

    def make() -> tuple[Tensor]:
        payload = checked_payload(key, layer, get(), current=is_folded)
        value = dequantize(payload, PLAIN)
        if not torch.equal(value.float(), dequantize(payload)):
            raise ValueError(
                f"'{key}' cannot be written in FP8: {reason}; and BF16 cannot hold its values "
                "exactly, because its scales are not powers of two. Convert the model with "
                "recipe='blockwise' or 'rowwise', or with this layer in skip"
            )
        return (value.t() if layer.fp8.transposed else value,)  # (N, K) -> as stored

    return TensorGroup((PlannedTensor(key, PLAIN, shape),), make)


def in_fp8(
    name: str,
    layer: Float8Layer,
    get: Callable[[], Tensor],
    format: ExportFormat,
    smooth: SmoothFold | None,
) -> Any:
    """Return the tensors of an FP8 layer in the export's format."""
    scale = input_scale(name, layer) if format.is_static else None
    if scale is not None and smooth is not None:
        scale = smooth.input_scale(layer, scale)
    is_folded = smooth is not None and layer in smooth
    payload = checked_payload(f"{name}.weight", layer, get(), current=is_folded)
    return format.tensors(payload, scale)


def folded(
    layer: Any,
    get: Callable[[], Tensor],
    fold: AdapterFold,
    smooth: SmoothFold | None,
    parameter: str = "weight",
) -> Tensor:
    """Return a weight with adapters and factors of Smooth-SwiGLU folded in."""
    weight = fold(layer, get(), parameter)
    return weight if smooth is None else smooth.weight(layer, weight)


@torch.no_grad()
def checked_payload(
    key: str, layer: Float8Layer, weight: Tensor, *, current: bool = False
) -> QuantizedTensor:
    """Return `weight_payload`.

    Raises:
        ValueError: the weight is not finite; the error has its name, `key`.
    """
    payload = weight_payload(layer, weight, current=current)
    check_finite(key, payload)
    return payload
