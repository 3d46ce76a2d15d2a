"""`ScalingRule`: how a layer's scales follow from the amaxes of past steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.config import FP8Config
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.quantization.scaling import delayed_scale, past_amax


class ScalingRule(NamedTuple):
    """How scales follow from recorded amaxes.

    Attributes:
        history_len, algorithm: length of the histories, and the amax that a scale takes from one.
        margins: headroom of input, weight and gradient in powers of two.
        eager: whether eager code uses the scales, too; otherwise only graphs of torch.compile do,
            which cast the weight with its current scale.
    """

    history_len: int
    algorithm: str
    margins: tuple[int, int, int]
    eager: bool = True

    @staticmethod
    def of(config: FP8Config, recipe: Recipe) -> "ScalingRule | None":
        """Return the rule of a layer, or None if its scales come from the current tensors."""
        if config.backend != "torch":
            return None
        if recipe.delayed:
            margins = config.margin, config.margin, config.margin
            return ScalingRule(config.amax_history_len, config.amax_compute_algo, margins)
        if config.graph_scales == "last_step" and recipe.name == "tensorwise" and not recipe.smooth:
            return LAST_STEP
        return None


LAST_STEP = ScalingRule(1, "most_recent", (2, 0, 3), eager=False)
"""The rule of ``FP8Config(graph_scales="last_step")``; margins from `known_scales.csv`."""


def scales_of(layer: Any, histories: Tensor) -> Tensor:
    """Compute scales (L, 3) from the histories (L, 3, H) of layers of one kind.

    Args:
        layer: one of these layers, for its options.
        histories: (L, 3, H) float32, the newest amax first.
    """
    rule, recipe = layer.fp8.scaling.rule, layer.fp8.recipe
    past = past_amax(histories, rule.algorithm)  # (L, 3)
    past = torch.where(past > 0, past, past.amax(0))  # only zeros so far: the largest elsewhere
    formats = recipe.input.format, recipe.weight.format, recipe.grad_output.format
    columns = zip(past.unbind(1), formats, rule.margins, strict=True)
    return torch.stack([delayed_scale(*column) for column in columns], 1)
