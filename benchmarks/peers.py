"""The libraries that the benchmarks compare with: torchao and Transformer Engine.

If a library cannot run, its builder raises an error, which the benchmark writes as a note into its
row. Both are used through their public interfaces, as documented.
"""

import dataclasses
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

TORCHAO_RECIPES = ("tensorwise", "rowwise")
TORCHAO_OPTIMIZERS = ("AdamW8bit", "AdamWFp8", "AdamW4bit")
TRANSFORMER_ENGINE_RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
}


def torchao(module: nn.Module, recipe: str, *, skip: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """Return `module` with its linears converted by
    ``torchao.float8.convert_to_float8_training``.
    """
    _require("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def converts(child: nn.Module, fqn: str) -> bool:
        return fqn.rpartition(".")[2] not in skip

    config = runnable(Float8LinearConfig.from_recipe_name(recipe))
    holder = nn.Sequential(module)  # it replaces children, and `module` may itself be a linear
    return convert_to_float8_training(holder, config=config, module_filter_fn=converts)[0]


def runnable(config: Any) -> Any:
    """Return torchao's configuration, emulated without a card.

    On a CPU, a product in FP8 takes up to 20 ms at toy size.
    """
    return dataclasses.replace(config, emulate=not torch.cuda.is_available())


def torchao_optimizer(
    name: str, parameters: Iterable[nn.Parameter], **options: float
) -> torch.optim.Optimizer:
    """Return torchao's low-bit AdamW, BF16 weights rounded stochastically: its own
    recommendation.
    """
    _require("torchao")
    import torchao.optim

    return getattr(torchao.optim, name)(parameters, bf16_stochastic_round=True, **options)


class TransformerEngine(nn.Module):
    """A module whose linears are Transformer Engine's, and which runs under its autocast.

    Args:
        module: BF16 module on a GPU, whose ``nn.Linear`` children are replaced, with their weights.
        recipe: a key of `TRANSFORMER_ENGINE_RECIPES`.
        skip: last components of the names of modules that stay unchanged.
    """

    def __init__(
        self, module: nn.Module, recipe: str, *, skip: tuple[str, ...] = ("lm_head",)
    ) -> None:
        super().__init__()
        _require("transformer_engine")
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        self._autocast = te.autocast
        options = {"reduce_amax": False} if recipe == "delayed" else {}  # one process
        self.recipe = getattr(recipes, TRANSFORMER_ENGINE_RECIPES[recipe])(**options)
        self.module = _as_te_linear(te, module) if type(module) is nn.Linear else module
        for parent in list(self.module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and name not in skip:
                    setattr(parent, name, _as_te_linear(te, child))

    def forward(self, *args, **kwargs):
        """Run the module's forward in FP8."""
        with self._autocast(enabled=True, recipe=self.recipe):
            return self.module(*args, **kwargs)


def _as_te_linear(te, linear: nn.Linear) -> nn.Module:
    out = te.Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device=linear.weight.device,
    )
    with torch.no_grad():
        out.weight.copy_(linear.weight)
        if linear.bias is not None:
            out.bias.copy_(linear.bias)
    return out


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package.replace('_', '-')} is not installed")
