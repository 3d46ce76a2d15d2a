"""The tensors of a model on their way into a checkpoint or an engine, computed one by one.

A `FoldedTensor` knows a tensor's names in checkpoints, and what is folded into its values, adapters
and the factors of Smooth-SwiGLU. Its generators compute the values of its parts when they are asked
for: plain, in FP8 as training multiplies by them, or these values in BF16.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.checkpoint.export_format import BLOCKS, ExportFormat
from torch_fp8.checkpoint.export_layers import check_finite
from torch_fp8.checkpoint.fold_adapters import AdapterFold, SmoothFold
from torch_fp8.checkpoint.safetensors_files import PlannedTensor, TensorGroup
from torch_fp8.checkpoint.stored_names import PLAIN, StoredPart
from torch_fp8.nn.delayed_scaling import INPUT, WEIGHT, pushed_history, scaling_buffers
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.recipe import make_recipe
from torch_fp8.quantization.scaling import delayed_scale, past_amax
from torch_fp8.tensor.base import dequantized
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.quantizer import Quantizer, WeightQuantizer
from torch_fp8.tensor.scale_source import ScaleSource
from torch_fp8.tensor.split_weight import stored


class ModelTensors:
    """The values of a model's tensors, from the model; subclasses read other sources."""

    def dtype(self, key: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a tensor's values are stored.

        Args:
            key: the tensor's name.
            tensor: the tensor of the model.
        """
        del key
        return stored(tensor).dtype

    def values(self, key: str, tensor: Tensor, layer: Float8Layer | None) -> Tensor:
        """Return a tensor's values.

        Args:
            key: the tensor's name.
            tensor: the tensor of the model.
            layer: the FP8 layer whose weight it is; None: it belongs to no FP8 layer.
        Raises:
            ValueError: the tensor has no values on this rank.
        """
        del layer
        if tensor.is_meta:
            raise ValueError(
                f"'{key}' has no values in this process (on the meta device, or offloaded); load "
                "it first"
            )
        return stored(tensor)


class FoldedTensor(NamedTuple):
    """A tensor of a model, and what is folded into it.

    Attributes:
        key: the tensor's name in the model.
        tensor: the tensor.
        module: the module that it belongs to.
        parts: the checkpoint's tensors for it.
        layer: the FP8 layer whose weight it is; None: it belongs to no FP8 layer.
        source: the source of its values.
        fold: the adapters that are folded into it.
        smooth: the factors of Smooth-SwiGLU that are folded into weights of FP8 layers.
    """

    key: str
    tensor: Tensor
    module: nn.Module
    parts: Sequence[StoredPart]
    layer: Float8Layer | None
    source: ModelTensors
    fold: AdapterFold
    smooth: SmoothFold | None = None

    def as_plain(self, dtype: torch.dtype) -> TensorGroup:
        """Return the parts in a dtype other than FP8."""
        return TensorGroup(self._planned(dtype), partial(self.plain, dtype))

    def as_bf16(self, otherwise: str) -> TensorGroup:
        """Return the parts as `in_bf16` yields them."""
        return TensorGroup(self._planned(PLAIN), partial(self.in_bf16, otherwise))

    def as_fp8(self, format: ExportFormat) -> TensorGroup:
        """Return the parts in the export's format."""
        planned: list[PlannedTensor] = []
        for name, _, shape in self._planned(PLAIN):
            planned += format.planned(name.removesuffix(".weight"), *shape)
        return TensorGroup(tuple(planned), partial(self.in_fp8, format))

    def _planned(self, dtype: torch.dtype) -> tuple[PlannedTensor, ...]:
        whole = tuple(self.tensor.shape)
        shapes = (whole if p.expert is None else (p.end - p.begin, whole[2]) for p in self.parts)
        return tuple(
            PlannedTensor(p.name, dtype, s) for p, s in zip(self.parts, shapes, strict=True)
        )

    def value(self) -> Tensor:
        """Return the tensor as it is stored, with all that is folded into it."""
        value = self.source.values(self.key, self.tensor, self.layer)
        value = self.fold(self.module, value, self.key.rpartition(".")[2])
        if self.layer is None or self.smooth is None:
            return value
        return self.smooth.weight(self.layer, value)

    @torch.no_grad()
    def plain(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the parts without FP8, in this dtype."""
        value = dequantized(self.value())  # FP8 if it belongs to a paused layer
        for part in self.parts:
            plain = part.of(value).detach().to(dtype)
            check_finite(part.name, plain)
            yield plain

    @torch.no_grad()
    def in_bf16(self, otherwise: str) -> Iterator[Tensor]:
        """Yield the parts in BF16, with exactly the values that training multiplies by.

        Args:
            otherwise: the end of the error if BF16 cannot hold them.
        """
        for payload in self._payloads():
            value = dequantize(payload, PLAIN)
            if not torch.equal(value.float(), dequantize(payload)):
                raise ValueError(f"'{self.key}' {otherwise}")
            is_transposed = self.layer is not None and self.layer.fp8.transposed
            yield value.t() if is_transposed else value  # (N, K) -> as stored

    @torch.no_grad()
    def in_fp8(self, format: ExportFormat) -> Iterator[Tensor]:
        """Yield the tensors of the parts in the export's format."""
        scale = None
        if self.layer is not None and format.is_static:
            scale = input_scale(self.key.removesuffix(".weight"), self.layer)
            scale = scale if self.smooth is None else self.smooth.input_scale(self.layer, scale)
        for payload in self._payloads(format.granularity == BLOCKS):
            yield from format.tensors(payload, scale)

    def _payloads(self, recast: bool = False) -> Iterator[QuantizedTensor]:
        """Yield the parts (N, K) as training multiplies by them.

        Args:
            recast: whether experts, which have a scale for each row, are cast again in blocks.
        """
        weight = self.value()
        if self.layer is not None:
            payload = self._of_layer(self.layer, weight)
            check_finite(self.key, payload)
            yield payload
            return
        values = dequantized(weight) if recast else weight
        for part in self.parts:
            if recast:
                payload = quantize(part.of(values), make_recipe("blockwise").weight)
            elif isinstance(weight, Float8FrozenWeight):
                fused = weight.payload.quantized
                payload = fused._replace(qdata=part.of(fused.qdata), scale=part.of(fused.scale))
            else:
                assert isinstance(self.module, Float8Experts)
                payload = quantize(part.of(weight), self.module.fp8.recipe.weight)
            check_finite(part.name, payload)
            yield payload

    def _of_layer(self, layer: Float8Layer, weight: Tensor) -> QuantizedTensor:
        """Return a weight (N, K) or (K, N) as the layer's next forward multiplies by it, (N, K).

        With delayed scaling the layer's history applies, unless factors are folded in, which it
        does not include.
        """
        is_folded = self.smooth is not None and layer in self.smooth
        known = layer.fp8.scales_known and not is_folded
        scale = scaling_buffers(layer)[1][WEIGHT, 0] if known else None
        quantizer = Quantizer(layer.fp8.recipe.weight, ScaleSource(scale))
        return WeightQuantizer(quantizer, transposed=layer.fp8.transposed).for_fprop(weight)


def input_scale(name: str, layer: Float8Layer) -> Tensor:
    """Return the () scale with which delayed scaling will cast the next input of `layer`.

    Raises:
        ValueError: no forward has recorded an amax yet, or an amax is not finite.
    """
    config, (history, _, slots) = layer.fp8.config, scaling_buffers(layer)
    amaxes = torch.stack(slots[:2]).view(torch.float32)
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
