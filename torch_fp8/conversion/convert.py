"""`convert_to_float8` converts a model; `torch_fp8.conversion.revert` undoes it.

Conversion swaps ``__class__`` in place and keeps the Parameter objects, so nothing that refers to
them (an optimizer, a tied module, FSDP's maps, a state dict) has to change.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.conversion.autotune import RecipeChoice, choose_recipe, recipe_of
from torch_fp8.conversion.detect_producers import down_projections
from torch_fp8.conversion.expert_layers import to_float8 as experts_to_float8
from torch_fp8.conversion.forward_precision import refuse_share, unscheduled
from torch_fp8.conversion.frozen_layers import FreezeReport, freeze_as_configured
from torch_fp8.conversion.fused_layers import (
    Producers,
    convert_producers,
    find_readers,
    replaces_ligers,
    revert_producers,
)
from torch_fp8.conversion.layer_options import layer_options, unused_overrides
from torch_fp8.conversion.output_layers import (
    convert_output_layers,
    find_output_layers,
    frozen_output_layers,
    revert_output_layers,
)
from torch_fp8.conversion.report import ConversionReport, SkippedModule, matmul_flops
from torch_fp8.conversion.revert import (
    keep_scaling_local,
    share_saturation,
    to_float8,
    to_stock,
)
from torch_fp8.conversion.selection import Product, first_reasons, select
from torch_fp8.nn.deferred_logits import defer_logits
from torch_fp8.nn.expert_adapters import take_adapters
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.layer_filter import QUANTIZED, is_ligers, is_linear, matches
from torch_fp8.nn.optimizer_checks import watch_first_steps
from torch_fp8.nn.transformer_engine import (
    NOT_SHARDED,
    check_transformer_engine,
    place_regions,
)
from torch_fp8.ops.hardware import UNMEASURED, check_device, check_driver, runs_natively
from torch_fp8.ops.scaled_grouped_mm import reason_not_grouped
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.recipe import Recipe


@torch.inference_mode(False)  # tensors made here are trained outside it
def convert_to_float8(
    model: nn.Module,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> ConversionReport:
    """Convert the linear layers of `model` in place, so that their GEMMs run in FP8.

    It converts ``nn.Linear``, subclasses that compute the same, transformers' ``Conv1D``, FSDP2's
    dynamic classes of these, and transformers' fused expert weights. It also converts the RMSNorms
    and gated MLPs between them, which it recognizes by what they compute. Adapters and modules
    matched by `config.skip` are never converted. Parameters, tying, ``requires_grad`` and
    ``state_dict`` keys stay the same. A second call with the same configuration changes nothing;
    with another one, it replaces the configuration. `revert` undoes the conversion.

    Args:
        model: any module; it may itself be an ``nn.Linear``.
        config: a configuration or the name of a recipe, or None for ``TORCH_FP8_CONFIG`` if set,
            else ``FP8Config()``.
        device: device on which the model will run, or None for the model's device. Its capability
            is checked, and recipe ``auto`` measures there (`torch_fp8.conversion.autotune`).
    Returns:
        A report of the converted modules, the skipped ones with reasons, and the share of the
        matmul FLOPs that run in FP8. It also names `skip` patterns that match no module.
    Raises:
        NothingToConvertError: no layer can run in FP8; this is a ValueError.
        ValueError: `device` cannot run the recipe (see `torch_fp8.ops.hardware.check_device`),
            `config.bf16_last` is a share of steps that only a Trainer knows, Triton finds no C
            compiler, or weights are sharded and Transformer Engine runs GEMMs.
        TypeError: `model` is not a module, or `config` is not a configuration.
        ImportError: Triton, or Transformer Engine if you asked for it, is not installed.
        RuntimeError: the rank that measures for this one did not finish in time.
    """
    config = config_or_default(config)
    check_arguments(convert_to_float8, locals())
    return convert(model, config, device)


def convert(
    model: nn.Module,
    config: FP8Config,
    device: torch.device | str | None,
    freeze: Callable[[nn.Module, FP8Config, torch.device], FreezeReport] = freeze_as_configured,
) -> ConversionReport:
    """Do what `convert_to_float8` does; `freeze` runs before norms and MLPs are connected."""
    refuse_share(config, "convert_to_float8")
    target = torch.device(device) if device is not None else _device_of(model)
    recipe = check_config(config, target)
    if _is_te(config) and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(NOT_SHARDED)
    revert_output_layers(model)
    products = select(model, config, recipe, target)
    in_fp8 = {product.name: product.module for product in products if product.reason is None}
    own = layer_options(in_fp8, config)
    choice, recipe = _choose(model, in_fp8, own, config, recipe, target)
    converted, experts, skipped = _swap(model, products, own, choice, config, recipe, target)
    heads = convert_output_layers(model, config, frozen_output_layers(model, config))
    fuses = bool(converted) and not _is_te(config)
    if not fuses:
        revert_producers(model)
    frozen = freeze(model, config, target)
    fused = convert_producers(model, config) if fuses else Producers()
    place_regions(model)
    take_adapters(model)
    keep_scaling_local(model)
    share_saturation(model)
    watch_first_steps(model)
    defer_logits(model)  # replaces forwards, which conversion otherwise takes for the user's
    is_emulated = config.emulate and not runs_natively(target, recipe.name)
    return ConversionReport(
        converted=tuple(converted),
        skipped=tuple(skipped),
        recipe=recipe,
        config=config,
        device=target,
        emulated=is_emulated or target.type != "cuda",
        unused_skip=tuple(p for p in config.skip if not _names_a_module(model, p)),
        flops=matmul_flops(model),
        producers=fused.producers,
        unfused=fused.unfused,
        groups=fused.groups,
        choice=choice,
        frozen=frozen,
        num_liger=sum(map(is_ligers, model.modules())),
        num_liger_fused=sum(map(replaces_ligers, model.modules())),
        overridden={name: converted[name] for name in converted if name in own},
        unused_overrides=unused_overrides(model, config),
        smooth=tuple(name for name in converted if converted[name].smooth),
        experts=tuple(experts),
        were_eager=any(getattr(module, "fp8_was_eager", False) for module in model.modules()),
        loss_heads=heads,
    )


def _choose(
    model: nn.Module,
    products: dict[str, Any],
    own: dict[str, FP8Config],
    config: FP8Config,
    recipe: Recipe,
    target: torch.device,
) -> tuple[RecipeChoice | None, Recipe]:
    """Measure if the recipe is ``auto``; return the choice (else None) and the model's recipe."""
    if config.recipe != "auto":
        return None, recipe
    free = [name for name in products if name not in own or own[name].recipe == "auto"]
    # Losses multiply output layers tensorwise; measured with all logits, they need gigabytes.
    heads = find_output_layers(model) if config.loss_head != "off" else {}
    linear = {n: products[n] for n in free if n not in heads and is_linear(products[n])}
    choice = choose_recipe(model, linear, find_readers(model, linear, config), config, target)
    if choice.not_measured is None:
        recipe = recipe_of(config, choice.recipe)
        check_device(target, recipe.name, config.emulate)  # another rank's card may be better
    return choice, recipe


def _swap(
    model: nn.Module,
    products: list[Product],
    own: dict[str, FP8Config],
    choice: RecipeChoice | None,
    config: FP8Config,
    recipe: Recipe,
    target: torch.device,
) -> tuple[dict[str, Recipe], list[str], list[SkippedModule]]:
    """Swap the class of each layer that runs in FP8; swap it back if it no longer should.

    Args:
        own: configurations of the layers that have an override.
        choice: result of ``auto``, with the layers that are slower in FP8, or None for a named
            recipe.
    Returns:
        The recipe of each converted linear layer; expert weights that were converted, both by
        qualified name; and the others with the reason.
    """
    slower = {} if choice is None else choice.left
    downs = down_projections(model, (config, *own.values()))
    native = reason_not_grouped(target, False) is None
    converted: dict[str, Recipe] = {}
    experts: list[str] = []
    skipped: list[SkippedModule] = []
    for name, module, reason in products:
        reason = slower.get(name) if reason is None else reason
        if reason is not None:
            if isinstance(module, FrozenStorage):  # a second conversion that skips more
                to_stock(module)
            skipped.append(SkippedModule(name, reason))
            continue
        options = own.get(name, config)
        if not is_linear(module):
            holder = name.rpartition(".")[0]
            experts_to_float8(module, holder, options, options.emulate and not native)
            experts.append(name)
            continue
        theirs = recipe
        if name in own:
            theirs = recipe_of(options, recipe.name if options.recipe == "auto" else options.recipe)
            check_device(target, theirs.name, options.emulate)
        theirs = replace(theirs, smooth=options.smooth_swiglu and module in downs)
        emulate = config.emulate and not runs_natively(target, theirs.name)
        to_float8(module, name, options, theirs, emulate)
        converted[name] = theirs
    quantized = any((product.reason or "").startswith(QUANTIZED) for product in products)
    if not (converted or experts or quantized):
        warnings.warn(
            f"no linear layer of {type(model).__name__} is faster in FP8 on this device, so all "
            f"stay in high precision ({first_reasons(skipped)}). To run them in FP8 anyway, "
            "name a recipe; to measure with your micro-batch size, set FP8Config(tokens=...)",
            stacklevel=3,
        )
    return converted, experts, skipped


def conversion_report(
    model: nn.Module,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> ConversionReport:
    """Report what `convert_to_float8` would do to `model`, without changing it.

    This converts a copy on the meta device, which needs no memory for weights and little time. If
    recipe ``auto`` has to measure, it does so now, and a later conversion in this process uses the
    result.

    Args:
        model, config, device: arguments of `convert_to_float8`.
    Returns:
        The report that `convert_to_float8` would return.
    Raises:
        ValueError, TypeError, ImportError, RuntimeError: see `convert_to_float8`.
    """
    check_arguments(conversion_report, locals())
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    twin = copy.deepcopy(model, memo)
    config = unscheduled(config_or_default(config))
    return convert_to_float8(twin, config, device=_device_of(model) if device is None else device)


def check_config(config: FP8Config, device: torch.device) -> Recipe:
    """Return the recipe that `config` runs on `device`.

    Raises:
        ValueError: `device` cannot run the recipe, or no kernel can start there.
        ImportError: Triton, or Transformer Engine if `config` asks for it, is not installed.
    """
    recipe = recipe_of(config, UNMEASURED if config.recipe == "auto" else config.recipe)
    if _is_te(config):
        check_transformer_engine(device, recipe.name)
    else:
        check_device(device, recipe.name, config.emulate)
    check_driver(device)
    return recipe


def _is_te(config: FP8Config) -> bool:
    return config.backend == "transformer-engine"


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _names_a_module(model: nn.Module, pattern: str) -> bool:
    # lm_head is the default pattern: a model without a module of that name is no mistake.
    return pattern == "lm_head" or any(matches(pattern, n) for n, _ in model.named_modules())
