"""Checks of a whole optimizer checkpoint, before any part of it is loaded."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.optim.residual import residual_shape, sharded_residual_shape
from torch_fp8.optim.state import (
    FORMATS_KEY,
    STATE_FORMATS,
    is_encoded,
    is_large,
    misfits,
)
from torch_fp8.quantization.split_float import EXACT_BITS, RESIDUAL_BITS
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.quantized_state import MOMENT_FORMATS

FORMAT_VERSION = 1
"""The format version of the entries that `Float8Optimizer.state_dict` adds to
torch.optim.AdamW's.
"""

OPTIONS_KEY = "torch_fp8"
RESIDUALS_KEY = "torch_fp8_residuals"
REFUSED_OPTIONS = ("amsgrad", "capturable", "differentiable")
"""The options of Adam and AdamW that 8-bit states do not support."""

_SAVED_BITS = (RESIDUAL_BITS, 4, 0)
"""The residual bits of saved large weights; 0.1.0 also wrote 4 and 0."""


def saved_options(seed: int, **others: Any) -> dict[str, Any]:
    """Return the options that key the rounding, and others, for a checkpoint."""
    return {"version": FORMAT_VERSION, "residual_bits": RESIDUAL_BITS, "seed": seed, **others}


def entries(
    state_dict: Mapping[str, Any], parameters: list[Tensor]
) -> Iterator[tuple[Any, Tensor, dict[str, Any]]]:
    """Yield (key in the checkpoint, parameter, entry in the checkpoint) for each parameter.

    An entry is a state, only a residual (of a weight that was not stepped yet), or empty.
    """
    residuals = state_dict.get(RESIDUALS_KEY) or {}
    ids = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
    for saved_id, parameter in zip(ids, parameters, strict=True):
        residual = residuals.get(saved_id)
        entry = {} if residual is None else {"residual": residual}
        yield saved_id, parameter, {**entry, **(state_dict["state"].get(saved_id) or {})}


def check_state_dict(state_dict: Mapping[str, Any], param_groups: list[dict[str, Any]]) -> int:
    """Raise ValueError, naming the entry, unless a checkpoint fits an optimizer's parameter groups.

    Args:
        state_dict: the checkpoint to be loaded.
        param_groups: the optimizer's groups.
    Returns:
        The residual bits of the checkpoint's large weights.
    """
    for problem in _problems(state_dict, param_groups):
        raise ValueError(problem)
    return state_dict.get(OPTIONS_KEY, {}).get("residual_bits", RESIDUAL_BITS)


def _problems(state_dict: Mapping[str, Any], param_groups: list[dict[str, Any]]) -> Iterator[str]:
    """Describe what does not fit. Only the first problem counts: later checks rely on earlier."""
    for key, kind in (("state", Mapping), ("param_groups", (list, tuple))):
        if not isinstance(state_dict.get(key), kind):
            yield (
                f"the optimizer's checkpoint has no {key!r}; expected what state_dict() of Adam or "
                f"AdamW returns, got the keys {list(state_dict)!r:.200}"
            )
    groups, states = state_dict["param_groups"], state_dict["state"]
    for i, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            yield f"param_groups[{i}] of the optimizer's checkpoint has no 'params'"
    saved, own = ([len(g["params"]) for g in each] for each in (groups, param_groups))
    if saved != own:
        yield (
            f"the optimizer's checkpoint has parameter groups of {saved} parameters, the optimizer "
            f"of {own}"
        )
    for i, group in enumerate(groups):
        for option in filter(group.get, REFUSED_OPTIONS):
            yield (
                f"param_groups[{i}][{option!r}] of the optimizer's checkpoint is "
                f"{group[option]!r}, which 8-bit states do not support; continue with "
                "FP8Config(opt_level='O1')"
            )
    options = state_dict.get(OPTIONS_KEY, saved_options(0))  # a stock checkpoint has none
    yield from (f"state_dict[{OPTIONS_KEY!r}]{problem}" for problem in _of_options(options))
    for saved_id in itertools.chain.from_iterable(group["params"] for group in groups):
        if not isinstance(states.get(saved_id, {}), Mapping | None):
            yield f"state[{saved_id!r}] is not a dict: {states[saved_id]!r:.80}"
    parameters = [p for group in param_groups for p in group["params"]]
    for saved_id, parameter, entry in entries(state_dict, parameters):
        problems = _of_state(parameter, entry) if states.get(saved_id) else ()
        of_residual = _of_residual(parameter, entry, options["residual_bits"])
        for problem in itertools.chain(problems, of_residual):
            yield f"state[{saved_id!r}]{problem}"


def has_residual(entry: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint entry has a residual that belongs to the saved weight.

    Stock AdamW casts our residuals to the dtype of its weights and passes them on, but it changes
    the weights without updating the residuals; such a residual is ignored.
    """
    saved = entry.get("residual")
    return saved is not None and not (isinstance(saved, Tensor) and saved.is_floating_point())


def _of_options(saved: Any) -> Iterator[str]:
    if not isinstance(saved, Mapping):
        yield f" is not a dict: {saved!r:.80}"
    if saved.get("version") != FORMAT_VERSION:
        yield (
            f"['version'] is {saved.get('version')!r}, but this version of torch-fp8 reads "
            f"{FORMAT_VERSION}"
        )
    seed, bits = saved.get("seed"), saved.get("residual_bits")
    if not isinstance(seed, int) or isinstance(seed, bool):
        yield f"['seed'] is {seed!r}, expected a whole number"
    if isinstance(bits, bool) or bits not in _SAVED_BITS:
        yield f"['residual_bits'] is {bits!r}, expected one of {_SAVED_BITS}"
    formats = saved.get(FORMATS_KEY, STATE_FORMATS)
    if formats != STATE_FORMATS:
        yield (
            f"[{FORMATS_KEY!r}] is {formats!r:.200}, but this version of torch-fp8 reads "
            f"{STATE_FORMATS}; save the states with checkpoint_states='float32' there"
        )


def _of_state(parameter: Tensor, entry: Mapping[str, Any]) -> Iterator[str]:
    """Describe why a checkpoint entry is not a state of this parameter."""
    for name in ("step", *MOMENT_FORMATS):
        if f"{name}_ratio_codes" in entry:
            yield (
                " has a first moment of 4 bits, from FP8Config(moment_bits=4) of torch-fp8 0.1.0, "
                "which this version does not read; with 0.1.0, save the states with "
                "checkpoint_states='float32'"
            )
        if name not in entry and not is_encoded(name, entry):
            yield f" has no {name!r}; is it a checkpoint of Adam or AdamW?"
    if not _is_count(entry["step"]):
        yield f"['step'] is {entry['step']!r:.80}, expected a number of steps"
    for name in MOMENT_FORMATS:
        value = entry.get(name)
        if is_encoded(name, entry):
            yield from misfits(name, entry, parameter)
            value = entry[f"{name}_codes"]
        elif not isinstance(value, Tensor) or not value.is_floating_point():
            yield f"[{name!r}] is not a floating-point tensor: {value!r:.80}"
        elif value.shape not in (parameter.shape, local(parameter).shape):
            yield (
                f"[{name!r}] has shape {tuple(value.shape)}, but the parameter "
                f"{tuple(parameter.shape)}"
            )
        yield from _of_data(name, parameter, value)


def _of_residual(parameter: Tensor, entry: Mapping[str, Any], bits: int) -> Iterator[str]:
    """Describe why the residual of a checkpoint entry, if any, does not fit the parameter."""
    if not has_residual(entry):
        return
    saved = entry["residual"]
    if not isinstance(saved, Tensor):
        yield f"['residual'] is not a tensor: {saved!r:.80}"
    if parameter.dtype != torch.bfloat16:
        return
    bits = bits if is_large(parameter) else EXACT_BITS
    dtypes = (torch.int16, torch.int8) if bits == EXACT_BITS else (torch.int8,)
    if saved.dtype not in dtypes:
        yield f"['residual'] is {saved.dtype}, expected {dtypes[0]}"
    fits = [residual_shape(parameter.shape, bits), residual_shape(local(parameter).shape, bits)]
    # A residual that was saved sharded keeps that shape, even if it has been gathered since.
    sharded = sharded_residual_shape(parameter, fits[0], bits)
    fits = [sharded] if isinstance(saved, DTensor) else [*fits, sharded]
    if tuple(saved.shape) not in fits:
        yield f"['residual'] has shape {tuple(saved.shape)}, expected {fits[0]}"
    yield from _of_data("residual", parameter, saved)


def _of_data(name: str, parameter: Tensor, value: Any) -> Iterator[str]:
    if local(value).is_meta and not local(parameter).is_meta:
        yield f"[{name!r}] is on the meta device, which has no data; load it to the CPU"


def _is_count(step: Any) -> bool:
    if isinstance(step, Tensor):
        if step.numel() != 1 or step.is_meta or step.is_complex():
            return False
        step = step.item()
    return isinstance(step, (int, float)) and math.isfinite(step) and step >= 0
