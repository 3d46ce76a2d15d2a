"""The plan of an exported checkpoint: each tensor of a model, in FP8 or in one plain dtype.

A weight in FP8 has exactly the bytes that the layer's forward multiplies by. If that is not
possible (its sides do not fit the blocks, or a weight that engines fuse with it is not in FP8), it
is written in BF16 if BF16 holds the same values exactly, as it does for power-of-two scales;
otherwise it is refused by its name. So engines serve the values of training.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from torch_fp8.checkpoint.export_experts import ExpertExport, with_routers
from torch_fp8.checkpoint.export_format import ExportFormat
from torch_fp8.checkpoint.export_layers import held_layers
from torch_fp8.checkpoint.export_refusals import (
    one_recipe,
    refuse_ambiguous,
    refuse_sharded,
    refuse_tied,
)
from torch_fp8.checkpoint.export_values import as_it_is, folded, in_bf16, in_fp8
from torch_fp8.checkpoint.fold_adapters import AdapterFold, adapted_layers
from torch_fp8.checkpoint.fold_smooth import SmoothFold
from torch_fp8.checkpoint.plain_dtype import plain_dtype
from torch_fp8.checkpoint.safetensors_files import DTYPES
from torch_fp8.checkpoint.safetensors_writer import PlannedTensor, TensorGroup
from torch_fp8.checkpoint.stored_names import StoredPart, own_tensors, stored_parts
from torch_fp8.conversion.selection import first_reasons
from torch_fp8.nn.layer_filter import expert_weights, is_linear
from torch_fp8.nn.linear import Float8Layer, is_paused
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


@dataclass
class ExportPlan:
    """The tensors to write.

    Attributes:
        format: the format, with its recipe.
        groups: the tensors, in the order of the model.
        fp8: the names of the layers that are in FP8.
        kept: (name, reason) of layers that run in FP8 but are written in BF16.
        recast: the names of the expert modules whose FP8 values differ from training's.
        ignored: the names of the linear layers and routers that are not in FP8.
        smooth: the Smooth-SwiGLU factors that are folded into weights.
    """

    format: ExportFormat
    groups: list[TensorGroup] = field(default_factory=list)
    fp8: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    recast: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    num_fp8_elements: int = 0
    num_fp8_bytes: int = 0
    smooth: SmoothFold | None = None

    def add_layer(
        self, name: str, layer: Float8Layer, get: Callable[[], Tensor], reason: str, key: str
    ) -> None:
        """Add the weight of an FP8 layer.

        Args:
            name: the layer's name.
            layer: the layer.
            get: a function that returns the weight as it is stored.
            reason: the reason why it is written in BF16; empty if it is in FP8.
            key: the weight's name in the checkpoint.
        """
        if reason:
            is_folded = self.smooth is not None and layer in self.smooth
            self.groups.append(in_bf16(key, layer, get, reason, is_folded))
            self.kept.append((name, reason))
            return
        rows, cols = layer.out_features, layer.in_features
        make = partial(in_fp8, name, layer, get, self.format, self.smooth)
        stored = self.format.planned(key.removesuffix(".weight"), rows, cols)
        self.fp8.append(name)
        self._add_fp8(TensorGroup(stored, make), rows * cols)

    def add_experts(self, name: str, experts: ExpertExport) -> None:
        """Add a module of experts, without its weights."""
        if not experts.reason:
            self.fp8.append(name)
        elif experts.is_fp8:
            self.kept.append((name, experts.reason))
        if experts.recast:
            self.recast.append(name)
        self.ignored += experts.ignored

    def _add_fp8(self, group: TensorGroup, num_elements: int) -> None:
        self.groups.append(group)
        self.num_fp8_elements += num_elements
        self.num_fp8_bytes += group.num_bytes


def plan_export(
    model: nn.Module,
    name: str,
    fold: AdapterFold | None = None,
    source: ModelTensors | None = None,
    paused: bool = False,
) -> ExportPlan:
    """Decide how each tensor of a converted model is written; nothing is computed yet.

    Args:
        model: the converted model; its tensors may be on the meta device if `source` has the
            values.
        name: the name of the format.
        fold: the adapters to fold into weights or to leave out; None: there are none.
        source: the source of the tensors' values; None: the model.
        paused: whether paused layers count as FP8, as they must for an engine that stays up.
    Raises:
        ValueError: the format cannot hold a layer or express the recipe; the error names both and a
            way out.
    """
    source = ModelTensors() if source is None else source
    fold = AdapterFold(model, merge=False) if fold is None else fold
    smooth = None if adapted_layers(model) else SmoothFold(model)
    places = list(fold.walk(model))
    layers = {n: m for n, m in places if isinstance(m, Float8Layer)}
    if not paused:
        layers = {n: m for n, m in layers.items() if not is_paused(m)}
    format = ExportFormat(name, one_recipe(layers, name))
    held = held_layers(model, layers, places, format)
    tied = getattr(model, "all_tied_weights_keys", ())  # by transformers, when it loads the model
    parts = model_parts(model, places)
    plan = ExportPlan(format, smooth=smooth)
    seen: dict[int, str] = {}
    for name, module in places:
        own_parts = {key: parts[key] for key in expert_weights(name, module)}
        experts = ExpertExport(name, module, own_parts, format) if own_parts else None
        if experts is not None:
            plan.add_experts(name, experts)
        reason = held.get(name, "not in FP8") if is_linear(module) else ""
        for key, tensor in own_tensors(name, module):
            refuse_sharded(key, tensor)
            before = seen.setdefault(id(tensor), key)
            if before != key and key in tied:
                refuse_tied(name, before.removesuffix(".weight"), layers)
                continue
            is_weight = key == f"{name}.weight"
            layer = layers.get(name) if is_weight else None
            get = partial(source.values, key, tensor, layer)
            if layer is not None:
                get = partial(folded, layer, get, fold, smooth)
                plan.add_layer(name, layer, get, reason, parts[key][0].name)
            elif experts is not None and key in own_parts:
                get = partial(folded, module, get, fold, None, key.rpartition(".")[2])
                group = experts.group(key, tensor.shape, get)
                if experts.reason:
                    plan.groups.append(group)
                else:
                    plan._add_fp8(group, tensor.numel())
            else:
                if is_weight:
                    get = partial(folded, module, get, fold, None)
                dtype = plain_dtype(model, key, tensor, source.dtype(key, tensor))
                planned = PlannedTensor(parts[key][0].name, dtype, tuple(tensor.shape))
                if planned.dtype not in DTYPES.values():
                    raise ValueError(
                        f"'{key}' is {tensor.dtype}, which safetensors files do not support"
                    )
                plan.groups.append(as_it_is(planned, get))
        if reason:
            plan.ignored.append(name)
    plan.ignored = with_routers(plan.ignored, places, parts)
    if not plan.fp8:
        raise ValueError(
            f"format {format.name!r} cannot store any of the model's FP8 layers: "
            + first_reasons(plan.kept, 3)
        )
    refuse_ambiguous(plan.fp8, plan.ignored)
    return plan


def model_parts(
    model: nn.Module, places: list[tuple[str, nn.Module]]
) -> dict[str, list[StoredPart]]:
    """Return the checkpoint's tensors for each tensor of a model with the modules `places`."""
    tensors = {key: t.shape for name, module in places for key, t in own_tensors(name, module)}
    fused = {key for name, module in places for key in expert_weights(name, module)}
    return stored_parts(model, tensors, fused)
