"""The plan of an exported checkpoint: each tensor of a model, in FP8 or in one plain dtype.

A weight in FP8 has exactly the bytes that the layer's forward multiplies by. If that is not
possible (its sides do not fit the blocks, or a weight that engines fuse with it is not in FP8), it
is written in BF16 if BF16 holds the same values exactly, as it does for power-of-two scales;
otherwise it is refused by its name. So engines serve the values of training.

Fused experts become a matrix for each expert and projection. They run with a scale for each row,
whatever the recipe of other layers (`torch_fp8.nn.experts.expert_recipe`). Formats with a scale for
each row get exactly the bytes that training multiplies by. For formats with blocks of 128 x 128 the
weights are cast again in these blocks. The values differ from training's, but are as close to the
weights, and the report says so. Other formats get BF16.
"""

from dataclasses import dataclass, field

from torch import nn

from torch_fp8.checkpoint.export_format import BLOCKS, ExportFormat
from torch_fp8.checkpoint.export_layers import (
    held_experts,
    held_layers,
    ignored_experts,
    one_recipe,
    refuse_ambiguous,
    refuse_sharded,
    refuse_tied,
    with_routers,
)
from torch_fp8.checkpoint.export_tensors import FoldedTensor, ModelTensors
from torch_fp8.checkpoint.fold_adapters import AdapterFold, SmoothFold, adapted_layers
from torch_fp8.checkpoint.safetensors_files import DTYPES, TensorGroup
from torch_fp8.checkpoint.stored_names import (
    PLAIN,
    StoredPart,
    own_tensors,
    plain_dtype,
    stored_parts,
)
from torch_fp8.conversion.selection import first_reasons
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.layer_filter import expert_weights, is_linear
from torch_fp8.nn.linear import Float8Layer, is_paused

_NOT_EXACT = (
    "cannot be written in FP8: {}; and BF16 cannot hold its values exactly, because its scales are "
    "not powers of two. Convert the model with recipe='blockwise' or 'rowwise', or with this layer "
    "in skip"
)


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
        reason = held.get(name, "not in FP8") if is_linear(module) else ""
        is_fp8, is_ignored = name in layers, bool(reason)
        fused = {key: parts[key] for key in expert_weights(name, module)}
        if fused:
            reason = held_experts(name, module, fused, format)
            is_fp8 = isinstance(module, Float8Experts)
            plan.ignored += ignored_experts(fused, format) if reason else []
        if is_fp8 and reason:
            plan.kept.append((name, reason))
        elif is_fp8:
            plan.fp8.append(name)
            plan.recast += [name] if fused and format.granularity == BLOCKS else []
        for key, tensor in own_tensors(name, module):
            refuse_sharded(key, tensor)
            before = seen.setdefault(id(tensor), key)
            if before != key and key in tied:
                refuse_tied(name, before.removesuffix(".weight"), layers)
                continue
            layer = layers.get(name) if key == f"{name}.weight" else None
            item = FoldedTensor(key, tensor, module, parts[key], layer, source, fold, smooth)
            if layer is None and key not in fused:
                dtype = plain_dtype(model, key, tensor, source.dtype(key, tensor))
                if dtype not in DTYPES.values():
                    raise ValueError(f"'{key}' is {dtype}, which safetensors files do not support")
                group = item.as_plain(dtype)
            elif reason:
                text = _NOT_EXACT.format(reason)
                group = item.as_bf16(text) if is_fp8 else item.as_plain(PLAIN)
            else:
                group = item.as_fp8(format)
                plan.num_fp8_elements += tensor.numel()
                plan.num_fp8_bytes += group.num_bytes
            plan.groups.append(group)
        if is_ignored:
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
