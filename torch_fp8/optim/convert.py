"""The functions that convert an optimizer, `convert_optimizer`, and undo it, `restore_weights`."""

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Adam, AdamW, Optimizer

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.optim.arguments import (
    NO_MODEL,
    adopt_stable_adamw,
    check_shardings,
    check_trained,
    has_linear_forward,
    reasons_to_stay,
    without_wrapper,
)
from torch_fp8.optim.checkpoint import REFUSED_OPTIONS
from torch_fp8.optim.converted import ConvertedOptimizer, stock_name, swap_class, unhooked
from torch_fp8.optim.embedding_dtype import HalfWeight, hide_weights, keep_output_dtype
from torch_fp8.optim.gradient_slot import attach_slots, detach_slots
from torch_fp8.optim.kept_payloads import keep_payloads
from torch_fp8.optim.muon import MuonOptimizer, is_muon
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.optim.report import OptimizerReport
from torch_fp8.optim.residual import drop_residuals
from torch_fp8.optim.split_optimizer import SplitOptimizer, join_parameters, reason_to_keep_weights
from torch_fp8.optim.state import State, is_large, settle_state
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.options import given
from torch_fp8.quantization.wording import counted
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.readable import REFERRED, swappable
from torch_fp8.tensor.split_weight import SplitWeight, split_parameter

_BASES = (AdamW, Adam)
_WRAPPED = "DistributedDataParallel has wrapped them before"
_SHARDED = "they were sharded before"


@torch.inference_mode(False)
def convert_optimizer(
    optimizer: Optimizer, config: FP8Config | str | None = None, *, model: nn.Module | None = None
) -> OptimizerReport:
    """Split an optimizer's master weights and, for Adam and AdamW, quantize the moments to 8 bits.

    The optimizer is changed in place: it stays the same object with its groups, hooks and
    scheduler, and the Parameters stay the same objects too. Large float32 weights of FP8 layers,
    embeddings and output layers are stored as a BF16 half and a residual
    (`torch_fp8.tensor.split_weight`). Existing Adam and AdamW states are quantized. Other
    optimizers, and (with a warning) subclasses with their own ``step``, keep their states and
    their step (`torch_fp8.optim.split_optimizer`). An optimizer that supports neither is left
    alone, and the report says why. A second call changes nothing.

    Args:
        optimizer: Adam, AdamW, a subclass that inherits their ``step``, or any other optimizer.
        config: a configuration, or the name of a recipe, or None as in `convert_to_float8`. Level
            O1 changes nothing.
        model: the converted model that the optimizer trains. It determines which weights can be
            split (`torch_fp8.optim.arguments`); without it no weight is split, and the report
            says so. Its embeddings keep returning float32, and its output layer keeps multiplying
            in float32 outside autocast (`torch_fp8.optim.embedding_dtype`). Weights already
            wrapped by DistributedDataParallel are not split. DTensors aren't either; split them
            with `torch_fp8.distributed.split_sharded`.
    Raises:
        ValueError: ``amsgrad``, ``capturable`` or ``differentiable`` is set; update clipping is
            set and weights are sharded; the states cannot follow a weight's sharding
            (`torch_fp8.optim.arguments`); the configuration needs `model` and it is None, or
            `model` has none of the optimizer's parameters.
        TypeError: an argument has the wrong type.
    """
    config = config_or_default(config)
    check_arguments(convert_optimizer, locals())
    check_trained(optimizer, config, model)
    if config.opt_level != "O1":
        config = adopt_stable_adamw(optimizer, config)
    name = stock_name(optimizer)
    reason = "level O1" if config.opt_level == "O1" else _reason_to_leave(optimizer)
    if reason is not None:
        drop_residuals(optimizer)
        if isinstance(optimizer, _BASES) and config.opt_level != "O1":
            warnings.warn(f"{reason}: it keeps its own states", stacklevel=2)
        return _keep_states(optimizer, OptimizerReport(name, False, reason), model, config)
    _refuse_options(optimizer, name, config)
    check_shardings(optimizer, model)
    _warn_if_lossy(optimizer, config)
    if not isinstance(optimizer, Float8Optimizer):
        swap_class(optimizer, Float8Optimizer)
    elif not config.split_weights:
        restore_weights(optimizer)
    assert isinstance(optimizer, Float8Optimizer)
    optimizer.set_config(config)
    for _, _, parameter in optimizer.indexed_parameters():
        state: State = optimizer.state.get(parameter, {})
        if "exp_avg" in state:  # of steps before the conversion
            settle_state(parameter, state)
    parameters = [p for _, _, p in optimizer.indexed_parameters() if not is_lazy(p)]
    split = _split_weights(optimizer, model)
    num_large, num_cached = sum(map(is_large, parameters)), keep_payloads(optimizer, model)
    report = OptimizerReport(name, True, num_cached=num_cached, num_large=num_large, **split)
    return gradients_report(optimizer, report)


def _keep_states(
    optimizer: Optimizer, report: OptimizerReport, model: nn.Module | None, config: FP8Config
) -> OptimizerReport:
    """Split the weights of an optimizer that keeps its own states."""
    muon = is_muon(optimizer)
    if config.opt_level == "O1" or not config.split_weights:
        restore_weights(optimizer)
        needs_split = muon and config.opt_level != "O1"
        reason = "its int8 momentum needs split weights" if needs_split else report.reason
        return replace(report, reason=reason)
    if not isinstance(optimizer, SplitOptimizer):
        why = reason_to_keep_weights(optimizer)
        if why is not None:
            return replace(report, reason=f"{report.reason}; its weights stay float32: {why}")
        swap_class(optimizer, MuonOptimizer if muon else SplitOptimizer)
    assert isinstance(optimizer, SplitOptimizer)
    optimizer.set_config(config)
    report = replace(report, converted=True, **_split_weights(optimizer, model))
    released = muon and optimizer.fp8_config.gradient_release
    options = [n for n in given(config, "adam") if n != "gradient_release" or not released]
    verb = "is" if len(options) == 1 else "are"
    of_adam = (f"{' and '.join(options)} {verb} for Adam and AdamW",) if options else ()
    if muon:
        states = f"an int8 momentum, {counted(report.num_split, 'weight')} in two halves"
        report = replace(report, reason=None, states=states, notes=of_adam)
    else:
        report = replace(report, reason="; ".join([str(report.reason), *of_adam]))
    return gradients_report(optimizer, report)


def _split_weights(optimizer: ConvertedOptimizer, model: nn.Module | None) -> dict[str, Any]:
    """Split weights, and quantize gradients; return the fields of the report that count weights."""
    reasons = {} if model is None else reasons_to_stay(model, optimizer.fp8_config)
    unknown = NO_MODEL if model is None else "of no module of the model"
    wrapped = _wrapped(model)
    num_split, to_split, stay = 0, list[Tensor](), list[str]()
    for _, _, parameter in optimizer.indexed_parameters():
        is_float32 = parameter.dtype == torch.float32 and is_large(parameter)
        if not is_float32 or not parameter.requires_grad:
            continue
        if isinstance(local(parameter), SplitWeight):
            num_split += 1
            continue
        reason = reasons.get(parameter, unknown)
        if not optimizer.fp8_config.split_weights:
            reason = "split_weights=False"
        elif isinstance(parameter, DTensor):
            reason = _SHARDED
        elif parameter in wrapped:
            reason = _WRAPPED
        elif reason is None and not swappable(parameter):
            reason = REFERRED
        if reason is not None:
            stay.append(reason)
            continue
        to_split.append(parameter)
    _split(dict.fromkeys(to_split))
    if model is not None:
        _keep_dtypes(optimizer, model)
    _convert_gradients(optimizer, model)
    num_split += len(to_split)
    return {"num_split": num_split, "num_float32": len(stay), "why_float32": _in_words(stay)}


def _split(parameters: Iterable[Tensor]) -> None:
    """Split each float32 Parameter (`torch_fp8.tensor.split_weight`).

    If that fails for one of them, for example for lack of memory, those before it are joined again.

    Args:
        parameters: leaves that are not sharded and that torch can swap (`swappable`).
    """
    split: list[Tensor] = []
    try:
        for parameter in parameters:
            split.append(split_parameter(parameter))
    except BaseException:
        join_parameters(split)
        raise


def _in_words(reasons: list[str]) -> str | None:
    """Join the distinct reasons, with counts if they differ, or return None if there are none."""
    counts = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    if len(counts) < 2:
        return next(iter(counts), None)
    return "; ".join(f"{count} {reason}" for reason, count in counts.items())


def _wrapped(model: nn.Module | None) -> set[Tensor]:
    """Return the weights that are in the buckets of a DistributedDataParallel."""
    modules = [] if model is None else model.modules()
    wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
    return {parameter for wrapper in wrappers for parameter in wrapper.parameters()}


def _keep_dtypes(optimizer: ConvertedOptimizer, model: nn.Module) -> None:
    """Keep high-precision modules computing in float32 after their weights were split."""
    split = {p for _, _, p in optimizer.indexed_parameters() if isinstance(p, SplitWeight)}
    keep_output_dtype(model, split)
    for module in model.modules():
        multiplies = has_linear_forward(module)
        if isinstance(module, Float8Layer):
            multiplies = not module.fp8.config.eval_fp8
        if multiplies and module.weight in split:
            hide_weights(module, HalfWeight())


def gradients_report(optimizer: Optimizer, report: OptimizerReport) -> OptimizerReport:
    """Update the fields of `report` that wrapping can change: 8-bit gradients and hooks."""
    if not isinstance(optimizer, ConvertedOptimizer):
        return report
    num = sum(optimizer.has_fp8_gradient(p) for *_, p in optimizer.indexed_parameters())
    why, hooks = optimizer.fp8_why_bf16_gradients, optimizer.fp8_hooks_restored
    return replace(report, num_fp8_gradients=num, why_bf16_gradients=why, num_hooks_restored=hooks)


def _convert_gradients(optimizer: ConvertedOptimizer, model: nn.Module | None) -> None:
    """Add hooks to exactly the parameters whose gradients are quantized or released."""
    had_hooks = optimizer.fp8_layers
    optimizer.fp8_layers, optimizer.fp8_why_bf16_gradients = (), None
    if optimizer.fp8_config.opt_level == "O3":
        assert model is not None
        wrapped, layers = _wrapped(model), (m for m in model.modules() if isinstance(m, RunsFP8))
        large = {weakref.ref(m): m for m in layers if any(map(is_large, m.fp8_weights))}
        late = {r for r, m in large.items() if not wrapped.isdisjoint(m.fp8_weights)}
        optimizer.fp8_layers = tuple(r for r in large if r not in late or r in had_hooks)
        if late and not optimizer.fp8_layers:
            optimizer.fp8_why_bf16_gradients = _WRAPPED
    missing = attach_slots(optimizer)
    if had_hooks:
        optimizer.fp8_hooks_restored += missing


@torch.inference_mode(False)
def restore_weights(optimizer: Optimizer) -> int:
    """Make each split weight a plain float32 Parameter again, the same object.

    A later `convert_optimizer` splits them again without any loss. Sharded weights stay split,
    because joining them needs the model: call `torch_fp8.distributed.join_sharded`. Weights that
    torch.profiler has recorded with ``record_shapes`` or ``with_stack`` stay split, with a warning,
    until the profiler is freed.

    Returns:
        The number of weights that are float32 again; 0 for an optimizer that was not converted.
    """
    check_arguments(restore_weights, locals())
    optimizer = without_wrapper(optimizer)
    if not isinstance(optimizer, ConvertedOptimizer):
        return 0
    detach_slots(optimizer)
    optimizer.fp8_layers = ()
    return join_parameters(p for _, _, p in optimizer.indexed_parameters())


def _reason_to_leave(optimizer: Optimizer) -> str | None:
    cls = optimizer._fp8_base if isinstance(optimizer, ConvertedOptimizer) else type(optimizer)
    if not isinstance(optimizer, _BASES):
        return "8-bit states are for Adam and AdamW"
    inherited = all(
        unhooked(getattr(cls, method)) in [unhooked(getattr(base, method)) for base in _BASES]
        for method in ("step", "state_dict", "load_state_dict", "_init_group")
    )
    return None if inherited else f"{cls.__name__} has its own step"


def _refuse_options(optimizer: Optimizer, name: str, config: FP8Config) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if config.update_clipping and any(isinstance(p, DTensor) for p in parameters):
        raise ValueError(
            f"FP8Config(update_clipping=True) needs the RMS of whole weights, but those of {name} "
            "are sharded; leave it out"
        )
    for i, group in enumerate(optimizer.param_groups):
        for option in filter(group.get, REFUSED_OPTIONS):
            raise ValueError(
                f"{name}({option}=True), in parameter group {i}, does not support 8-bit states; "
                "leave it out, or keep the optimizer unchanged with FP8Config(opt_level='O1')"
            )


def _warn_if_lossy(optimizer: Optimizer, config: FP8Config) -> None:
    """Warn if the learning rate is so low that rounding noise hides a part of the updates."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    in_bf16 = any(p.dtype == torch.bfloat16 and is_large(p) for p in parameters)
    rates = [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups]
    small = [rate for rate in rates if 0 < rate < 1e-5]
    if small and in_bf16 and not config.split_weights:
        warnings.warn(
            "FP8Config(split_weights=False) with BF16 weights at the learning rate "
            f"{min(small):g}: rounding noise then hides part of the updates (their cosine to "
            "float32's is below 0.995); with split_weights=True it is negligible",
            stacklevel=3,
        )
