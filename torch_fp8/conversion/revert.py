"""`revert` turns a converted model back into a stock one.

The class of each linear layer changes, in both directions, and the Parameters stay.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.config import FP8Config
from torch_fp8.conversion.expert_layers import to_stock as experts_to_stock
from torch_fp8.conversion.frozen_layers import option_that_keeps
from torch_fp8.conversion.fused_layers import revert_producers
from torch_fp8.conversion.output_layers import revert_output_layers
from torch_fp8.distributed.tensor_parallel.styles import check_style
from torch_fp8.nn.class_swap import add_mixin, remove_mixin
from torch_fp8.nn.conv1d import Float8Conv1D
from torch_fp8.nn.expert_adapters import take_adapters
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer, Float8Linear
from torch_fp8.nn.merge_aware import stop_merge_aware
from torch_fp8.nn.transformer_engine import TransformerEngineLinear, place_regions
from torch_fp8.optim.embedding_dtype import restore_output_dtype
from torch_fp8.optim.grad_hooks import remove_hook
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
    modules = [m for m in model.modules() if isinstance(m, Float8Layer)]
    for module in modules:
        to_stock(module)
    experts = [m for m in model.modules() if isinstance(m, Float8Experts)]
    for module in experts:
        experts_to_stock(module)
    take_adapters(model)
    place_regions(model)
    keep_scaling_local(model)
    parameters = [p for p in model.parameters() if not isinstance(p, DTensor)]
    for parameter in parameters:
        remove_hook(parameter)
    join_parameters(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = plain(parameter.grad)
    return len(modules) + len(experts)


def keep_scaling_local(model: nn.Module) -> None:
    """Keep DistributedDataParallel from overwriting each rank's amaxes with those of rank 0.

    By default it broadcasts buffers before each forward. A rank with larger activations than rank 0
    would then compute its scales from amaxes that are too small, and saturate.
    """
    ours = {
        f"{name}.{buffer}".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, Float8Layer)
        for buffer, _ in module.named_buffers(recurse=False)
        if buffer.startswith("fp8_")
    }
    ignored = model.__dict__.get("_ddp_params_and_buffers_to_ignore", [])
    others = [name for name in ignored if not name.rpartition(".")[2].startswith("fp8_")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*others, *sorted(ours)]
    )
    if not others and not ours:
        del model._ddp_params_and_buffers_to_ignore


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
            fp8.forget_quantizers()
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
    assert isinstance(module, Float8Layer)
    module.configure(name, config, recipe, emulate)
    check_style(module)


def to_stock(module: Float8Layer) -> None:
    """Give `module` its original class back, and its weight in high precision."""
    module.thaw_weights()
    module.drop_fp8()
    remove_mixin(module, next(mixin for mixin in _MIXINS if isinstance(module, mixin)))
