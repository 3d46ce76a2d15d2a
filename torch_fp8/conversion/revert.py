"""`revert` turns a converted model back into a stock one.

The class of each linear layer changes, in both directions, and the Parameters stay.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.config import FP8Config
from torch_fp8.conversion.expert_layers import to_stock as experts_to_stock
from torch_fp8.conversion.frozen_layers import option_that_keeps
from torch_fp8.conversion.fused_layers import revert_producers
from torch_fp8.conversion.output_layers import revert_output_layers
from torch_fp8.distributed.links import STATE_KEY, exchanges_state, load_exchanges_state
from torch_fp8.distributed.tensor_parallel.styles import check_style
from torch_fp8.nn.class_swap import add_mixin, remove_mixin, unwrapped_name
from torch_fp8.nn.conv1d import Float8Conv1D
from torch_fp8.nn.delayed_scaling import restore_scales
from torch_fp8.nn.expert_adapters import take_adapters
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.linear import Float8Layer, Float8Linear
from torch_fp8.nn.merge_aware import stop_merge_aware
from torch_fp8.nn.scale_buffers import unite_scales
from torch_fp8.nn.transformer_engine import TransformerEngineLinear, place_regions
from torch_fp8.optim.embedding_dtype import restore_output_dtype
from torch_fp8.optim.gradient_slot import remove_slot
from torch_fp8.optim.split_optimizer import join_parameters
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.encoded import plain


@torch.inference_mode(False)
def revert(model: nn.Module) -> int:
    """Turn every FP8 layer of `model` back into its original class, in place.

    Weights stored in two halves become plain float32 Parameters, one at a time, and weights stored
    as FP8 only get their dtype back. Parameters stay the same objects. A model that is not sharded
    keeps nothing of this package, except for weights that torch.profiler refers to (see
    `restore_weights`); its optimizer keeps its 8-bit moments.

    Args:
        model: module that `convert_to_float8` converted, or any other.
    Returns:
        The number of modules that were reverted.
    """
    check_arguments(revert, locals())
    restore_output_dtype(model)
    stop_merge_aware(model)
    revert_producers(model)
    revert_output_layers(model)
    modules = [m for m in model.modules() if isinstance(m, FrozenStorage)]
    for module in modules:
        to_stock(module)
    take_adapters(model)
    place_regions(model)
    keep_scaling_local(model)
    parameters = [p for p in model.parameters() if not isinstance(p, DTensor)]
    for parameter in parameters:
        remove_slot(parameter)
    join_parameters(parameters)
    for parameter in parameters:
        parameter.grad = plain(parameter.grad)
    return len(modules)


def keep_scaling_local(model: nn.Module) -> None:
    """Keep DistributedDataParallel from overwriting each rank's amaxes with those of rank 0.

    By default it broadcasts buffers before each forward. A rank with larger activations than rank 0
    would then compute its scales from amaxes that are too small, and saturate.
    """

    def is_ours(name: str) -> bool:
        return name.rpartition(".")[2].startswith("fp8_")

    ours = sorted(name for name, _ in model.named_buffers() if is_ours(name))
    ignored = model.__dict__.get("_ddp_params_and_buffers_to_ignore", [])
    others = [name for name in ignored if not is_ours(name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*others, *ours])
    if not others and not ours:
        del model._ddp_params_and_buffers_to_ignore


def share_saturation(model: nn.Module) -> None:
    """Let the layers of a model return to current scales together, so that two graphs suffice.

    The layers of a block also get one tensor for their scales.
    """
    layers = [m for m in model.modules() if isinstance(m, Float8Layer) and m.fp8.scaling]
    scalings: list[Any] = [layer.fp8.scaling for layer in layers]
    for scaling in scalings:
        scaling.saturation = scalings[0].saturation
        scaling.saturation.members.add(scaling)
    unite_scales(layers)


_MIXINS = (TransformerEngineLinear, Float8Linear, Float8Conv1D)


def to_float8(
    module: nn.Module, name: str, config: FP8Config, recipe: Recipe, emulate: bool
) -> None:
    """Make `module` run `recipe`, whatever it runs now; arguments as in `Float8Layer.configure`.

    If the configuration keeps a frozen weight in FP8, the weight stays frozen and gets the recipe
    when it is thawed.
    """
    uses_te = config.backend == "transformer-engine"
    if isinstance(module, Float8Layer):
        fp8, frozen = module.fp8, module.fp8.frozen
        stays = module.frozen_weight is not None and option_that_keeps(config) is None
        if frozen is not None and stays:
            fp8.config, fp8.name, frozen.recipe = config, name, recipe
            if fp8.recipe.smooth != recipe.smooth:
                module.run_frozen(fp8.recipe, fp8.emulate, frozen.notice)
            return
        module.thaw_weights()
        fp8 = module.fp8
        if (fp8.config, fp8.recipe) == (config, recipe):
            fp8.run_emulated(emulate)
            return
        if isinstance(module, TransformerEngineLinear) != uses_te:
            to_stock(module)
    if not isinstance(module, Float8Layer):
        linear = TransformerEngineLinear if uses_te else Float8Linear
        add_mixin(module, linear if isinstance(module, nn.Linear) else Float8Conv1D)
    module.configure(name, config, recipe, emulate)
    check_style(module)


def to_stock(module: FrozenStorage) -> None:
    """Give a layer or experts their original class back, and their weights in high precision."""
    if isinstance(module, Float8Experts):
        experts_to_stock(module)
        return
    module.thaw_weights()
    module.drop_fp8()
    remove_mixin(module, next(mixin for mixin in _MIXINS if isinstance(module, mixin)))


_SCALING = ("amax_history", "last_scale")
_SATURATION = "saturation"


def scaling_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the scaling state as plain float32 tensors on the CPU; empty for most configurations.

    Delayed scaling adds two keys for each layer, under its qualified name without compile and
    checkpoint wrappers:

    * ``<name>.amax_history`` (3, H): amaxes of input, weight and grad_output, the most recent
      first; negative where an outlier was left out;
    * ``<name>.last_scale`` (2,): scales of input and weight computed from the history.

    ``graph_scales="last_step"`` adds them, too, and for one layer of the model, or several,
    ``<name>.saturation`` (2,): whether the next step casts with current scales, and how many
    operands the last step has saturated.

    ``fp8_communication`` is the choice that ``communication="auto"`` measured for this job's links.

    Args:
        model: converted model.
    """
    check_arguments(scaling_state_dict, locals())
    exchanges = exchanges_state(model)
    state = {} if exchanges is None else {STATE_KEY: exchanges}
    for name, module in _delayed_modules(model):
        for key, value in zip(_SCALING, module.scaling_state, strict=True):
            state[f"{name}.{key}"] = value.detach().cpu().clone()
        scaling = module.fp8.scaling
        saturation = None if scaling is None else scaling.saturation.state(scaling.number)
        if saturation is not None:
            state[f"{name}.{_SATURATION}"] = saturation
    return state


def load_scaling_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore a state from `scaling_state_dict`, so that training continues exactly as before.

    An empty `state` (from stock training, or from another recipe) changes nothing.

    Args:
        model: model converted with the same configuration.
        state: return value of `scaling_state_dict`.
    Raises:
        TypeError: `model` or `state` has the wrong type.
        ValueError: `state` belongs to another model or history length, or its history contains an
            Inf or NaN. Nothing is loaded in that case.
    """
    check_arguments(load_scaling_state_dict, locals())
    state = {unwrapped_name(key): value for key, value in state.items()}
    exchanges = state.pop(STATE_KEY, None)
    saturations = {key: state.pop(key) for key in list(state) if key.endswith(f".{_SATURATION}")}
    modules = dict(_delayed_modules(model)) if state else {}
    targets = {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in zip(_SCALING, module.scaling_state, strict=True)
    }
    for key in sorted(targets.keys() ^ state.keys()) if targets else ():
        where = "in the model, not in the state" if key in targets else "in the state only"
        raise ValueError(f"FP8 scaling state does not fit the model: {key!r} is {where}")
    for key, target in targets.items():
        if state[key].shape != target.shape:
            raise ValueError(
                f"FP8 scaling state {key!r} has shape {tuple(state[key].shape)}, expected "
                f"{tuple(target.shape)}; was it saved with another amax_history_len?"
            )
        if key.endswith(_SCALING[0]) and not state[key].isfinite().all():
            raise ValueError(f"FP8 scaling state {key!r} holds an Inf or NaN; load an earlier one")
    with torch.no_grad():
        for name, module in modules.items():
            history, last_scale = (state[f"{name}.{key}"] for key in _SCALING)
            module.load_scaling_state(history, last_scale)
            saturation = saturations.get(f"{name}.{_SATURATION}")
            if saturation is not None and module.fp8.scaling is not None:
                module.fp8.scaling.saturation.load(module.fp8.scaling.number, saturation)
    restore_scales(layer for layer in modules.values() if layer.fp8.scales_known)
    if exchanges is not None:
        load_exchanges_state(model, exchanges)


def _delayed_modules(model: nn.Module) -> Iterator[tuple[str, Float8Layer]]:
    for name, module in model.named_modules():
        if isinstance(module, Float8Layer) and (module.fp8.recipe.delayed or module.fp8.scaling):
            yield unwrapped_name(name), module
