"""Conversion of one linear layer and its reverse: the class changes, the Parameters stay."""

from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.frozen_layers import option_that_keeps
from torch_fp8.distributed.tensor_parallel.styles import check_style
from torch_fp8.nn.class_swap import add_mixin, remove_mixin
from torch_fp8.nn.conv1d import Float8Conv1D
from torch_fp8.nn.linear import Float8Layer, Float8Linear
from torch_fp8.nn.transformer_engine import TransformerEngineLinear
from torch_fp8.quantization.recipe import Recipe

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
