"""Save and load the state of delayed scaling in a checkpoint."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from torch_fp8.distributed.links import STATE_KEY, exchanges_state, load_exchanges_state
from torch_fp8.nn.class_swap import unwrapped_name
from torch_fp8.nn.delayed_scaling import restore_scales
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.argument_types import check_arguments

_SCALING = ("amax_history", "last_scale")


def scaling_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the scaling state as plain float32 tensors on the CPU; empty for most configurations.

    Delayed scaling adds two keys for each layer, under its qualified name without compile and
    checkpoint wrappers:

    * ``<name>.amax_history`` (3, H): amaxes of input, weight and grad_output, the most recent
      first; negative where an outlier was left out;
    * ``<name>.last_scale`` (2,): scales of input and weight computed from the history.

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
            raise ValueError(f"FP8 scaling state {key!r} holds an Inf or NaN")
    with torch.no_grad():
        for name, module in modules.items():
            history, last_scale = (state[f"{name}.{key}"] for key in _SCALING)
            module.load_scaling_state(history, last_scale)
    restore_scales(layer for layer in modules.values() if layer.fp8.scales_known)
    if exchanges is not None:
        load_exchanges_state(model, exchanges)


def _delayed_modules(model: nn.Module) -> Iterator[tuple[str, Float8Layer]]:
    for name, module in model.named_modules():
        if isinstance(module, Float8Layer) and module.fp8.recipe.delayed:
            yield unwrapped_name(name), module
