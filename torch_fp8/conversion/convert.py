"""The functions that convert a model: `convert_to_float8` and `revert`.

Conversion swaps ``__class__`` in place. The Parameter objects stay the same, so whatever holds them
(an optimizer, a tied module, FSDP's maps, a state dict) never notices.
"""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.conversion.autotune import choose_recipe, recipe_of
from torch_fp8.conversion.frozen_layers import freeze_as_configured, option_that_keeps
from torch_fp8.conversion.fused_layers import NO_PRODUCERS, convert_producers, revert_producers
from torch_fp8.conversion.layer_options import (
    high_precision_pattern,
    layer_options,
    own_recipe,
    unused_overrides,
)
from torch_fp8.conversion.report import ConversionReport, SkippedModule, matmul_flops
from torch_fp8.conversion.smooth_layers import down_projections
from torch_fp8.distributed.tensor_parallel.styles import check_style
from torch_fp8.nn.class_swap import add_mixin, remove_mixin
from torch_fp8.nn.conv1d import Float8Conv1D
from torch_fp8.nn.foreign_layer import QUANTIZED, is_ligers, quantized_by
from torch_fp8.nn.layer_filter import (
    expert_weights,
    high_precision_modules,
    is_linear,
    matches,
    skip_reason,
)
from torch_fp8.nn.linear import Float8Layer, Float8Linear
from torch_fp8.nn.merge_aware import stop_merge_aware
from torch_fp8.nn.transformer_engine import (
    NOT_SHARDED,
    RECIPES,
    check_transformer_engine,
    unaligned,
)
from torch_fp8.nn.transformer_engine_linear import TransformerEngineLinear, place_regions
from torch_fp8.ops.hardware import check_device, resolve_auto, runs_natively
from torch_fp8.ops.kernel_driver import check_driver
from torch_fp8.optim.embedding_dtype import restore_output_dtype
from torch_fp8.optim.grad_hooks import remove_hook
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.split_weight import join_parameter

RUNS_IN_FP8 = "FP8 runs linear layers of 16 features and more"


class NothingToConvertError(ValueError):
    """A model has no layer that can run in FP8. It stays as it was.

    Attributes:
        reason: why, without the way out that the message ends with.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. {RUNS_IN_FP8}; train this model in BF16 mixed precision")
        self.reason = reason


_MIXINS = (TransformerEngineLinear, Float8Linear, Float8Conv1D)


def convert_to_float8(
    model: nn.Module,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> ConversionReport:
    """Convert the linear layers of `model` to run their GEMMs in FP8, in place.

    These are ``nn.Linear``, subclasses of it that compute the same, transformers' ``Conv1D`` and
    FSDP2's dynamic classes of all of them. The RMSNorms and gated MLPs between them are converted,
    too, and found by what they compute. LoRA adapters and modules that `config.skip` names are
    never converted. Parameters, tying, ``requires_grad`` and ``state_dict`` keys stay as they are.
    A second call changes nothing, or replaces the configuration; `revert` undoes the conversion.

    Args:
        model: any module; it may itself be an ``nn.Linear``.
        config: a configuration, or the name of a recipe. None: ``TORCH_FP8_CONFIG`` if set, else
            ``FP8Config()``.
        device: the device on which the model will run. Its capability is checked, and recipe
            ``auto`` measures there (`torch_fp8.conversion.autotune`). None: the model's device.
    Returns:
        The modules that were converted, those that were skipped and why, and the share of the
        matmul FLOPs that run in FP8.
    Raises:
        NothingToConvertError: a ValueError; no layer can run in FP8.
        ValueError: `device` cannot run the recipe (see
            `torch_fp8.ops.hardware.check_device`), or Triton finds no C compiler; weights are
            sharded and the backend is Transformer Engine. A `skip` pattern without a match is no
            error: the report names it.
        TypeError: `model` is not a module, or `config` not a configuration.
        ImportError: Transformer Engine is asked for and not installed.
        RuntimeError: another rank was to measure for this one, and has not finished in time.
    """
    config = config_or_default(config)
    _check_model(model)
    target = torch.device(device) if device is not None else _device_of(model)
    recipe = check_config(config, target)
    is_te = _is_te(config)
    if is_te and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(NOT_SHARDED)
    plan = list(_plan(model, config, recipe))
    linears = {name: module for name, module, reason in plan if reason is None}
    others = any((reason or "").startswith(QUANTIZED) for _, _, reason in plan)
    if not (linears or others):
        raise NothingToConvertError(_nothing_converted(model, plan))
    own = layer_options(linears, config)
    choice = None
    if config.recipe == "auto":
        free = {n: m for n, m in linears.items() if n not in own or own[n].recipe == "auto"}
        choice = choose_recipe(model, free, config, target)
        if choice.not_measured is None:
            recipe = recipe_of(config, choice.recipe)
            check_device(target, recipe.name, config.emulate)  # another rank's card may be better
    left = {} if choice is None else choice.left
    emulate = config.emulate and not runs_natively(target, recipe.name)

    downs = down_projections(model, (config, *own.values()))
    converted, skipped, overridden = [], [], {}
    for name, module, reason in plan:
        reason = left.get(name) if reason is None else reason
        if reason is None:
            options = own.get(name, config)
            theirs = own_recipe(options, recipe.name, target) if name in own else recipe
            theirs = replace(theirs, smooth=options.smooth_swiglu and module in downs)
            emulated = config.emulate and not runs_natively(target, theirs.name)
            _to_float8(module, name, options, theirs, emulated)
            converted.append(name)
            if name in own:
                overridden[name] = theirs
        else:
            if isinstance(module, Float8Layer):  # a second conversion that skips more
                _to_stock(module)
            skipped.append(SkippedModule(name, reason))
    if not converted and not others:
        warnings.warn(
            f"no linear layer of {type(model).__name__} is faster in FP8 on this device, so all "
            f"stay in high precision ({_reasons(skipped)}). Name a recipe to run them in FP8 all "
            "the same, or the tokens of your micro-batches, FP8Config(tokens=...)",
            stacklevel=2,
        )
    if is_te or not converted:
        revert_producers(model)
    frozen = freeze_as_configured(model, config, target)
    made = NO_PRODUCERS if is_te or not converted else convert_producers(model, config)
    unused = unused_overrides(model, config)
    place_regions(model)
    _keep_scaling_local(model)
    return ConversionReport(
        converted=tuple(converted),
        skipped=tuple(skipped),
        recipe=recipe,
        config=config,
        device=target,
        emulated=emulate or target.type != "cuda",
        unused_skip=tuple(p for p in config.skip if not _names_a_module(model, p)),
        flops=matmul_flops(model),
        producers=made.converted,
        choice=choice,
        frozen=frozen,
        num_liger=sum(map(is_ligers, model.modules())),
        overridden=overridden,
        unused_overrides=unused,
        unfused=made.unfused,
        smooth=tuple(name for name, m in model.named_modules() if _is_smooth(m)),
    )


def conversion_report(
    model: nn.Module,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> ConversionReport:
    """Report what `convert_to_float8` would do to `model`, which stays as it is.

    A copy without data, on the meta device, is converted, which takes neither the memory of the
    weights nor, on the CPU, more than a moment. If recipe ``auto`` has to measure, it does so now,
    and a conversion that follows in this process uses its result.

    Args:
        model, config, device: see `convert_to_float8`.
    Returns:
        The report that `convert_to_float8` would return.
    Raises:
        ValueError, TypeError, ImportError, RuntimeError: see `convert_to_float8`.
    """
    _check_model(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    twin = copy.deepcopy(model, memo)
    return convert_to_float8(twin, config, device=_device_of(model) if device is None else device)


def revert(model: nn.Module) -> int:
    """Turn every FP8 linear layer of `model` back into its original class, in place.

    Weights in two halves become plain float32 Parameters, one after the other. Nothing of ours is
    left in a model that is not sharded; its optimizer keeps its 8-bit moments.

    Args:
        model: a module that `convert_to_float8` has converted, or any other.
    Returns:
        The number of modules reverted. Parameters stay the same objects.
    """
    restore_output_dtype(model)
    stop_merge_aware(model)
    revert_producers(model)
    modules = [m for m in model.modules() if isinstance(m, Float8Layer)]
    for module in modules:
        _to_stock(module)
    place_regions(model)
    _keep_scaling_local(model)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            remove_hook(parameter)
            join_parameter(parameter)
            if parameter.grad is not None:
                parameter.grad = plain(parameter.grad)
    return len(modules)


def check_config(config: FP8Config, device: torch.device) -> Recipe:
    """Return the recipe that `config` runs on `device`.

    Raises:
        ValueError: a device that cannot run it, or on which no kernel can start.
        ImportError: Transformer Engine is asked for and is not installed; Triton is not installed.
    """
    recipe = _resolve(config, device)
    if _is_te(config):
        check_transformer_engine(device, recipe.name)
    else:
        check_device(device, recipe.name, config.emulate)
    check_driver(device)
    return recipe


def _check_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    how = "pass the model"
    if isinstance(model, torch.optim.Optimizer):
        how = "torch_fp8.convert_optimizer(optimizer, config, model=model) converts an optimizer"
    elif isinstance(model, type) and issubclass(model, nn.Module):
        how = "pass an instance of the class"
    raise TypeError(f"convert_to_float8 takes an nn.Module, got {type(model).__name__}; {how}")


def _is_te(config: FP8Config) -> bool:
    return config.backend == "transformer-engine"


def _resolve(config: FP8Config, device: torch.device) -> Recipe:
    name = config.recipe
    if name == "auto":
        name = resolve_auto(device)
        if _is_te(config) and name not in RECIPES:
            name = "tensorwise"
    return recipe_of(config, name)


def _plan(
    model: nn.Module, config: FP8Config, recipe: Recipe
) -> Iterator[tuple[str, Any, str | None]]:
    """Yield each matrix product with a weight, its module, and why it stays in high precision or
    None.
    """
    kept_high = high_precision_modules(model, config.skip)
    for name, module in model.named_modules():
        if not is_linear(module):
            library = quantized_by(module)
            if library is not None:
                yield name, module, f"{QUANTIZED}{library}"
                continue
            yield from ((full, module, why) for full, why in expert_weights(name, module))
            continue
        reason = skip_reason(name, module, config.skip, kept_high)
        if reason is None:
            reason = high_precision_pattern(name, config)
        if reason is None and _is_te(config):
            reason = unaligned(module, recipe)
        yield name, module, reason


def _to_float8(
    module: nn.Module, name: str, config: FP8Config, recipe: Recipe, emulate: bool
) -> None:
    if isinstance(module, Float8Layer):
        if module.frozen_weight is not None and option_that_keeps(config) is None:
            module.fp8_config, module.fp8_name = config, name
            module.fp8_thawed_recipe = recipe
            if module.fp8_recipe.smooth != recipe.smooth:
                module.run_frozen(module.fp8_recipe, module.fp8_emulate)
            return
        module.thaw_weight()
        if (module.fp8_config, module.fp8_recipe) == (config, recipe):
            module.fp8_emulate = emulate
            return
        module.drop_scaling()
        if isinstance(module, TransformerEngineLinear) != _is_te(config):
            _to_stock(module)
    if not isinstance(module, Float8Layer):
        linear = TransformerEngineLinear if _is_te(config) else Float8Linear
        add_mixin(module, linear if isinstance(module, nn.Linear) else Float8Conv1D)
    assert isinstance(module, Float8Layer)
    module.configure(name, config, recipe, emulate)
    check_style(module)


def _is_smooth(module: nn.Module) -> bool:
    return isinstance(module, Float8Layer) and module.fp8_recipe.smooth


_OWN = (
    *("fp8_config", "fp8_recipe", "fp8_emulate", "fp8_name"),
    *("fp8_delayed", "fp8_casts", "fp8_transposed"),
)
"""What `Float8Layer.configure` has left in a layer."""


def _to_stock(module: Float8Layer) -> None:
    module.thaw_weight()
    module.drop_scaling()
    for name in _OWN:
        delattr(module, name)
    remove_mixin(module, next(mixin for mixin in _MIXINS if isinstance(module, mixin)))


def _keep_scaling_local(model: nn.Module) -> None:
    """Keep DistributedDataParallel from copying rank 0's amaxes over every other rank's.

    DistributedDataParallel broadcasts buffers before each forward by default; a rank whose
    activations are larger than rank 0's would then saturate, since its scales would come from
    amaxes that are not its own.
    """
    ours = {
        f"{name}.{buffer}".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, Float8Layer)
        for buffer in module._buffers
        if buffer.startswith("fp8_")
    }
    ignored = model.__dict__.get("_ddp_params_and_buffers_to_ignore", [])
    others = [name for name in ignored if not name.rpartition(".")[2].startswith("fp8_")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*others, *sorted(ours)]
    )
    if not others and not ours:
        del model._ddp_params_and_buffers_to_ignore


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _names_a_module(model: nn.Module, pattern: str) -> bool:
    # The default stands for the usual name of an output layer; not every model has one.
    return pattern == "lm_head" or any(matches(pattern, n) for n, _ in model.named_modules())


def _nothing_converted(model: nn.Module, plan: list[tuple[str, Any, str | None]]) -> str:
    skipped = [SkippedModule(name, reason) for name, _, reason in plan if reason is not None]
    if not skipped:
        return f"{type(model).__name__} has no nn.Linear: there is nothing to run in FP8"
    return f"no linear layer of {type(model).__name__} can run in FP8 ({_reasons(skipped)})"


def _reasons(skipped: list[SkippedModule]) -> str:
    reasons = "; ".join(f"'{s.name}': {s.reason}" for s in skipped[:5])
    return reasons + (f"; and {len(skipped) - 5} more" if len(skipped) > 5 else "")
