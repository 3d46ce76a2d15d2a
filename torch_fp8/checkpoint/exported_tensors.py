"""The tensors of a checkpoint or an engine: in FP8, in BF16 with FP8 values, or in a plain dtype.

A weight in FP8 has exactly the bytes that the layer's forward multiplies by. If that is not
possible (its sides do not fit the blocks, or a weight that engines fuse with it is not in FP8), it
is written in BF16 if BF16 holds the same values exactly, as it does for power-of-two scales;
otherwise an error names it. So engines serve the values of training.

Fused experts become a matrix for each expert and projection. They run with a scale for each row,
whatever the recipe of other layers (`torch_fp8.nn.experts.expert_recipe`). Formats with a scale for
each row get exactly the bytes that training multiplies by. For formats with blocks of 128 x 128 the
weights are cast again in these blocks. The values differ from training's, but are as close to the
weights, and the report says so. Other formats get BF16.

`ExportedTensors` is one generator of (name, tensor), for files and for engines. Its dry run on the
meta device, `ExportedTensors.planned`, has names, shapes and dtypes before a value is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.checkpoint.adapters import AdapterFold, SmoothFold
from torch_fp8.checkpoint.export_layers import (
    check_finite,
    held_experts,
    held_layers,
    ignored_experts,
    one_recipe,
    refuse_ambiguous,
    refuse_tied,
    with_routers,
)
from torch_fp8.checkpoint.formats import FileFormat, export_format
from torch_fp8.checkpoint.names import PLAIN, StoredPart, own_tensors, plain_dtype, stored_parts
from torch_fp8.conversion.selection import first_reasons
from torch_fp8.nn.delayed_scaling import INPUT, WEIGHT, pushed_history
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.layer_filter import expert_weights, is_linear, output_layer
from torch_fp8.nn.linear import Float8Layer, is_paused
from torch_fp8.nn.scale_buffers import scaling_buffers
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.recipe import make_recipe
from torch_fp8.quantization.scaling import ScaleSource, delayed_scale, past_amax
from torch_fp8.tensor.base import dequantized
from torch_fp8.tensor.frozen_payload import FROZEN_BLOCK
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.quantizer import Quantizer, WeightQuantizer
from torch_fp8.tensor.split_weight import stored

_NOT_EXACT = (
    "cannot be written in FP8: {}; and BF16 cannot hold its values exactly, because its scales are "
    "not powers of two. Convert the model with recipe='blockwise' or 'rowwise', or with this layer "
    "in skip"
)


class ModelTensors:
    """The values of a model's tensors, from the model; subclasses read other sources.

    Args:
        read: the function that returns the stored values of a tensor.
    """

    def __init__(self, read: Callable[[Tensor], Tensor] = stored) -> None:
        self._read = read

    def dtype(self, key: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a tensor's values are stored.

        Args:
            key: the tensor's name.
            tensor: the tensor of the model.
        """
        return self._read(tensor).dtype

    def values(self, key: str, tensor: Tensor, layer: Float8Layer | None) -> Tensor:
        """Return a tensor's values.

        Args:
            key: the tensor's name.
            tensor: the tensor of the model.
            layer: the FP8 layer whose weight it is, or None if it belongs to no FP8 layer.
        Raises:
            ValueError: the tensor has no values on this rank.
        """
        if tensor.is_meta:
            raise ValueError(
                f"'{key}' has no values in this process (on the meta device, or offloaded); load "
                "it first"
            )
        return self._read(tensor)


class _Item(NamedTuple):
    """A tensor of a model, and the form in which it is written.

    Attributes:
        key: the tensor's name in the model.
        tensor: the tensor.
        module: the module that it belongs to.
        layer: the FP8 layer whose weight it is, or None if it belongs to no FP8 layer.
        parts: the checkpoint's tensors for it.
        form: FP8 in a format; a plain dtype; or BF16 with exactly the values of training, given as
            the end of the error if BF16 cannot hold them.
    """

    key: str
    tensor: Tensor
    module: nn.Module
    layer: Float8Layer | None
    parts: Sequence[StoredPart]
    form: FileFormat | str | torch.dtype


@dataclass
class ExportedTensors:
    """The tensors of a model for a file or an engine; iteration yields (name, tensor).

    Attributes:
        source: the source of the tensors' values.
        fold: the adapters to fold into weights or to leave out.
        smooth: the factors of Smooth-SwiGLU that are folded into weights of FP8 layers.
        format: the format, with its recipe, or None if all tensors are plain.
        items: the tensors of the model, in its order.
        fp8: the names of the layers that are in FP8.
        kept: (name, reason) of layers that run in FP8 but are written in BF16.
        recast: the names of the expert modules whose FP8 values differ from training's.
        ignored: the names of the linear layers and routers that are not in FP8.
    """

    source: ModelTensors
    fold: AdapterFold
    smooth: SmoothFold
    format: FileFormat | None
    items: list[_Item] = field(default_factory=list)
    fp8: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    recast: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self.items:
            yield from self._tensors(item)

    def planned(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors on the meta device: by the model's name, and by the written name."""
        return {item.key: dict(self._tensors(item, dry=True)) for item in self.items}

    @torch.no_grad()
    def _tensors(self, item: _Item, dry: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for all parts of a tensor, on the meta device if `dry`."""
        key, form, layer = item.key, item.form, item.layer
        if dry:
            dtype = self.source.dtype(key, item.tensor)
            value = torch.empty(item.tensor.shape, dtype=dtype, device="meta")
        else:
            value = self.source.values(key, item.tensor, layer)
        value = self.fold(item.module, value, key.rpartition(".")[2])
        value = self.smooth.weight(layer, value)
        if isinstance(form, torch.dtype):
            value = dequantized(value)  # FP8 if it belongs to a paused layer
            for part in item.parts:
                plain = part.of(value).detach().to(form)
                check_finite(part.name, plain)
                yield part.name, plain
            return
        scale, recast = None, False
        if isinstance(form, FileFormat):
            recast = form.block == FROZEN_BLOCK
            scale = self._input_scale(key, layer) if layer and form.is_static else None
        for part, payload in zip(item.parts, self._payloads(item, value, recast), strict=True):
            if isinstance(form, FileFormat):
                yield from form.tensors(part.name.removesuffix(".weight"), payload, scale)
                continue
            plain = dequantize(payload, PLAIN)
            if not (plain.is_meta or torch.equal(plain.float(), dequantize(payload))):
                raise ValueError(f"'{key}' {form}")
            is_transposed = layer is not None and layer.fp8.transposed
            yield part.name, plain.t() if is_transposed else plain  # (N, K) -> as stored

    def _payloads(self, item: _Item, weight: Tensor, recast: bool) -> Iterator[QuantizedTensor]:
        """Yield the parts (N, K) as training multiplies by them.

        Args:
            item: the item of the weight.
            weight: the tensor as it is stored.
            recast: whether experts, which have a scale for each row, are cast again in blocks.
        """
        if item.layer is not None:
            payload = self._of_layer(item.layer, weight)
            check_finite(item.key, payload)
            yield payload
            return
        values = dequantized(weight) if recast else weight
        for part in item.parts:
            if recast:
                payload = quantize(part.of(values), make_recipe("blockwise").weight)
            elif isinstance(weight, Float8FrozenWeight):
                fused = weight.payload.quantized
                payload = fused._replace(qdata=part.of(fused.qdata), scale=part.of(fused.scale))
            else:
                assert isinstance(item.module, Float8Experts)
                payload = quantize(part.of(weight), item.module.fp8.recipe.weight)
            check_finite(part.name, payload)
            yield payload

    def _of_layer(self, layer: Float8Layer, weight: Tensor) -> QuantizedTensor:
        """Return a weight (N, K) or (K, N) as the layer's next forward multiplies by it, (N, K).

        With delayed scaling the layer's history applies, unless factors are folded in, which it
        does not include.
        """
        known = layer.fp8.recipe.delayed and layer.fp8.scales_known and layer not in self.smooth
        scale = scaling_buffers(layer)[1][WEIGHT, 0] if known else None
        quantizer = Quantizer(layer.fp8.recipe.weight, ScaleSource(scale))
        return WeightQuantizer(quantizer, transposed=layer.fp8.transposed).for_fprop(weight)

    def _input_scale(self, key: str, layer: Float8Layer) -> Tensor:
        """Return the () scale with which delayed scaling will cast the next input of `layer`.

        Raises:
            ValueError: no forward has recorded an amax yet, or an amax is not finite.
        """
        name = key.removesuffix(".weight")
        config, (history, _, slots) = layer.fp8.config, scaling_buffers(layer)
        amaxes = torch.stack(slots[:2]).view(torch.float32)
        if not bool(history.isfinite().all() & amaxes.isfinite().all()):
            raise ValueError(
                f"the amax history of the input of '{name}' holds an Inf or NaN, so its serving "
                "scale would be meaningless: training has diverged, or is about to; export an "
                "earlier checkpoint"
            )
        past = past_amax(pushed_history(layer)[INPUT], config.amax_compute_algo)
        if not bool(past):
            raise ValueError(
                f"'{name}' has recorded no amax of its input, so there is no input_scale; run a "
                "forward in training mode, or load the history (load_scaling_state_dict), then "
                "export"
            )
        scale = delayed_scale(past, layer.fp8.recipe.input.format, config.margin)
        return self.smooth.input_scale(layer, scale)


def exported_tensors(
    model: nn.Module,
    name: str | None,
    fold: AdapterFold,
    source: ModelTensors | None = None,
    *,
    in_bf16: str | None = None,
    paused: bool = False,
) -> ExportedTensors:
    """Decide how each tensor of a converted model is written; nothing is computed yet.

    Args:
        model: the converted model; its tensors may be on the meta device if `source` has the
            values.
        name: the name of the format, or None if all tensors are plain.
        fold: the adapters to fold into weights or to leave out.
        source: the source of the tensors' values, or None for the model.
        in_bf16: the end of the error if BF16 cannot hold a layer's FP8 values, for an engine that
            casts BF16 weights to the format, and experts in its own way; None writes FP8.
        paused: whether paused layers count as FP8, as they must for an engine that keeps running.
    Raises:
        ValueError: the format cannot hold a layer or express the recipe; the error names both and a
            way out.
    """
    is_file = name is not None and in_bf16 is None
    places = list(fold.walk(model))
    linears = {place for place, module in places if is_linear(module)}
    layers = {n: m for n, m in places if isinstance(m, Float8Layer) and name is not None}
    if not paused:
        layers = {n: m for n, m in layers.items() if not is_paused(m)}
    heads = {output_layer(module) for _, module in places}  # no format holds them in FP8
    others = {n: m for n, m in layers.items() if m not in heads} or layers
    format = None if name is None else export_format(name, one_recipe(others, name))
    held = {} if format is None else held_layers(model, layers, linears, heads, format)
    tied = getattr(model, "all_tied_weights_keys", ())  # by transformers, when it loads the model
    tensors = {place: list(own_tensors(place, module)) for place, module in places}
    stacks = {place: expert_weights(place, module) for place, module in places}
    shapes = {key: tensor.shape for of_place in tensors.values() for key, tensor in of_place}
    parts = stored_parts(model, shapes, {key for keys in stacks.values() for key in keys})
    smooth = SmoothFold(None if name is None or fold.wrappers else model)
    export = ExportedTensors(source or ModelTensors(), fold, smooth, format)
    seen: dict[int, str] = {}
    for name, module in places:
        reason = held.get(name, "not in FP8") if name in linears else ""
        is_fp8, is_ignored = name in layers, bool(reason)
        fused = {key: parts[key] for key in stacks[name]}
        if fused and format is not None:
            reason = held_experts(name, module, fused, format)
            is_fp8 = isinstance(module, Float8Experts)
            export.ignored += ignored_experts(fused, format) if reason else []
        if is_fp8 and reason:
            export.kept.append((name, reason))
        elif is_fp8:
            export.fp8.append(name)
            export.recast += [name] if fused and format and format.block == FROZEN_BLOCK else []
        for key, tensor in tensors[name]:
            if isinstance(tensor, DTensor):
                raise ValueError(
                    f"'{key}' is sharded across ranks; save the model with Lightning or "
                    "Accelerate, then run torch-fp8 export on that checkpoint"
                )
            before = seen.setdefault(id(tensor), key)
            if before != key and key in tied:
                refuse_tied(name, before.removesuffix(".weight"), layers)
            if before != key and (key in tied or not is_file):
                continue
            layer = layers.get(name) if key == f"{name}.weight" else None
            form: FileFormat | str | torch.dtype
            if format is None or (layer is None and (key not in fused or in_bf16 is not None)):
                form = plain_dtype(model, key, tensor, export.source.dtype(key, tensor))
                if is_file and form.is_complex:
                    raise ValueError(f"'{key}' is {form}, and engines read no complex tensors")
            elif reason:
                form = _NOT_EXACT.format(reason) if is_fp8 else PLAIN
            else:
                form = in_bf16 or format
            export.items.append(_Item(key, tensor, module, layer, parts[key], form))
        if is_ignored:
            export.ignored.append(name)
    export.ignored = with_routers(export.ignored, [n for n, keys in stacks.items() if keys], parts)
    if format is not None and not export.fp8:
        raise ValueError(
            f"format {format.name!r} cannot store any of the model's FP8 layers: "
            + first_reasons(export.kept, 3)
        )
    refuse_ambiguous(export.fp8, export.ignored)
    return export
